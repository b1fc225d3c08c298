"""Tells everyone who shares a GPU that a fault lost it.

An illegal access or another kernel's fault ends the CUDA context, and with it every stream, tensor and graph that the
process has on that GPU. Nothing brings it back but a new process. So the fault is noted once for the device, not for
the engine that met it: every engine there ends its requests with :class:`engine.errors.DeviceLost` and refuses new
ones, its health check fails, and whoever supervises the process restarts it. Engines on other devices go on.

Running out of memory is no such fault, and neither is NaN.
"""

from __future__ import annotations

import logging

import torch

from engine.errors import DeviceLost

logger = logging.getLogger(__name__)

# Keyed by device, for the process as a whole: that is what a CUDA context belongs to.
_lost: dict[torch.device, str] = {}


def probe(device: torch.device) -> str | None:
    """Ask a device whether it still works; what it says if it does not. Waits for everything it is doing."""
    if device.type != "cuda":
        return None
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as fault:
        return str(fault).splitlines()[0]
    return None


def check(device: torch.device, cause: Exception) -> DeviceLost | None:
    """Tell, after a step failed, whether the device is lost, and note it if so."""
    if device not in _lost:
        fault = probe(device)
        if fault is None:
            return None
        _lost[device] = fault
        logger.critical("%s is lost (%s); every model on it is down until the process is restarted", device, fault)
    error = DeviceLost(str(device), _lost[device])
    error.__cause__ = cause
    return error


def refuse_if_lost(device: torch.device) -> None:
    """Raise :class:`engine.errors.DeviceLost` for a device noted as lost."""
    fault = _lost.get(device)
    if fault is not None:
        raise DeviceLost(str(device), fault)
