"""Lets engines of one device make room for one another: a light one waits a little where a heavy one is short of time.

A step of a small model takes most of the memory's bandwidth however few sequences are in it, and its stream goes first.
Small models that step whenever they can therefore leave a large one a quarter of the device, for tokens that nobody
needed so soon. So an engine is *pressed* while it has prompts to compute or its steps take longer than they should, and
while a heavier engine is pressed, a lighter one begins its steps no closer together than its pace: its batches grow,
each token costs less, and the rest of the device goes where it is short. The heaviest engine never waits, an engine
alone never waits, and nobody waits longer than its pace.

This says when a step may begin, not how the device runs what was launched: that is the streams' priority.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class DeviceShare:
    """Knows the engines of one device. Safe from any thread."""

    def __init__(self) -> None:
        self._places: tuple[DevicePlace, ...] = ()
        self._lock = threading.Lock()

    def join(self, *, weight_bytes: int, pace_s: float, wake: Callable[[], None]) -> DevicePlace:
        """Take a place.

        Parameters
        ----------
        weight_bytes : of the model; who has more is the heavier
        pace_s : from the start of a step to the start of the next, at most, for the sake of heavier engines
        wake : called, from any thread, when there is nothing to wait for any more
        """
        with self._lock:
            place = DevicePlace(self, weight_bytes, pace_s, wake)
            self._places = (*self._places, place)
        return place

    def leave(self, place: DevicePlace) -> None:
        """Give a place up. Idempotent."""
        with self._lock:
            self._places = tuple(each for each in self._places if each is not place)
        place.press(False)

    def others(self, place: DevicePlace) -> tuple[DevicePlace, ...]:
        return tuple(each for each in self._places if each is not place)


class DevicePlace:
    """Stands for one engine on its device; only its own thread calls it.

    Attributes
    ----------
    is_pressed : this engine needs more of the device than it gets
    """

    def __init__(self, share: DeviceShare, weight_bytes: int, pace_s: float, wake: Callable[[], None]) -> None:
        self._share = share
        self._weight_bytes = weight_bytes
        self.pace_s = pace_s
        self._wake = wake
        self.is_pressed = False
        self._began_s = self._active_s = float("-inf")
        self._is_active = False

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until the next step may begin; 0 is now."""
        if not any(other.is_pressed and other._weight_bytes > self._weight_bytes for other in self._share.others(self)):
            return 0.0
        return max(self._began_s + self.pace_s - now_s, 0.0)

    def begin(self, now_s: float) -> None:
        """Note that a step begins."""
        self._began_s = self._active_s = now_s
        self._is_active = True

    def rest(self, now_s: float) -> None:
        """Note that nothing of this engine is on the device any more."""
        if self._is_active:
            self._is_active, self._active_s = False, now_s

    def press(self, is_pressed: bool) -> None:
        """Say whether this engine is short of the device's time."""
        eased = self.is_pressed and not is_pressed
        self.is_pressed = is_pressed
        if eased:
            for other in self._share.others(self):
                other._wake()

    def was_alone(self, since_s: float) -> bool:
        """Tell whether no other engine had anything on the device from ``since_s`` on."""
        return not any(other._is_active or other._active_s > since_s for other in self._share.others(self))

    def leave(self) -> None:
        self._share.leave(self)
