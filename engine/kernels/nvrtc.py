"""Compiles CUDA C++ at first use by NVRTC, the compiler that PyTorch's CUDA builds bring along, and launches it.

No toolkit is needed at run time. Compiled programs are kept for the process; one of ours takes about a second.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from engine.errors import KernelBuildFailed

_FOLDER = Path(__file__).parent
_PRELUDE = "ptx.cuh"

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_PROGRAMMATIC = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION

_compiling = threading.Lock()


def find_nvrtc() -> ctypes.CDLL:
    """Return the compiler library, from the loader's path or from PyTorch's own packages."""
    names = [f"libnvrtc.so.{major}" for major in (13, 12)]
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    import torch

    packages = Path(torch.__file__).parents[1] / "nvidia"
    for name in names:
        for path in sorted(packages.glob(f"**/{name}")):
            return ctypes.CDLL(str(path))
    raise KernelBuildFailed(f"Neither {' nor '.join(names)} was found; PyTorch's CUDA packages bring one.")


def compile_cubin(source: str, defines: Mapping[str, int], arch: str) -> bytes:
    """Compile ``source`` (a file here), our prelude before it, to machine code; it may include the ``.cuh`` here.

    Parameters
    ----------
    defines : compile-time parameters
    arch : such as ``sm_90a``

    Raises
    ------
    KernelBuildFailed
        With the compiler's log.
    """
    lib = find_nvrtc()
    text = (_FOLDER / _PRELUDE).read_text() + (_FOLDER / source).read_text()
    options = [f"--gpu-architecture={arch}", "--std=c++17", *(f"-D{name}={value}" for name, value in defines.items())]
    headers = sorted(_FOLDER.glob("*.cuh"))
    names = (ctypes.c_char_p * len(headers))(*(path.name.encode() for path in headers))
    texts = (ctypes.c_char_p * len(headers))(*(path.read_bytes() for path in headers))
    program = ctypes.c_void_p()
    _ok(lib, lib.nvrtcCreateProgram(ctypes.byref(program), text.encode(), source.encode(), len(headers), texts, names))
    try:
        array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if lib.nvrtcCompileProgram(program, len(options), array):
            size = ctypes.c_size_t()
            lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            lib.nvrtcGetProgramLog(program, log)
            raise KernelBuildFailed(f"{source} does not compile for {arch}: {log.value.decode(errors='replace')}")
        size = ctypes.c_size_t()
        _ok(lib, lib.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        cubin = ctypes.create_string_buffer(size.value)
        _ok(lib, lib.nvrtcGetCUBIN(program, cubin))
        return cubin.raw
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def _ok(lib: ctypes.CDLL, status: int) -> None:
    if status:
        lib.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise KernelBuildFailed(f"NVRTC: {lib.nvrtcGetErrorString(status).decode()}")


# Launching


class _LaunchAttribute(ctypes.Structure):
    # The value is a union of 64 bytes, at offset 8; programmatic serialisation uses its first int.
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_byte * 60))


class _LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    )


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise KernelBuildFailed(f"{what}: {(text.value or b'unknown error').decode()} ({status}).")


class Kernel:
    """Launches one function of a compiled program, on the device that was current when it was loaded.

    Parameters
    ----------
    shared_bytes : dynamic shared memory of a thread block
    """

    def __init__(self, cubin: bytes, name: str, shared_bytes: int = 0) -> None:
        module = ctypes.c_void_p()
        self._function = ctypes.c_void_p()
        self._shared_bytes = shared_bytes
        _check(_driver().cuModuleLoadData(ctypes.byref(module), cubin), f"loading {name}")
        _check(_driver().cuModuleGetFunction(ctypes.byref(self._function), module, name.encode()), f"finding {name}")
        if shared_bytes:
            status = _driver().cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED, shared_bytes)
            _check(status, f"{shared_bytes} bytes of shared memory for {name}")

    def launch(
        self,
        grid: tuple[int, int],
        threads: int,
        arguments: Sequence[ctypes.Structure | ctypes.c_void_p | ctypes.c_int],
        stream: int,
        *,
        early: bool,
    ) -> None:
        """Enqueue.

        Parameters
        ----------
        early : may start before the kernel ahead of it in the stream has ended (programmatic dependent launch); the
            kernel waits by itself before it touches what that one wrote
        """
        attribute = _LaunchAttribute(_PROGRAMMATIC, 0, 1)
        config = _LaunchConfig(
            (grid[0], grid[1], 1),
            (threads, 1, 1),
            self._shared_bytes,
            ctypes.c_void_p(stream),
            ctypes.pointer(attribute),
            1 if early else 0,
        )
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        _check(_driver().cuLaunchKernelEx(ctypes.byref(config), self._function, pointers, None), "launching a kernel")


# Copies of boxes

# CU_TENSOR_MAP_DATA_TYPE_…, and the bytes of an element.
_DATA_TYPES = {"torch.float16": (6, 2), "torch.bfloat16": (9, 2), "torch.float8_e4m3fn": (0, 1)}
_SWIZZLES = {64: 2, 128: 3}  # by the bytes of a box along a row
_L2_PROMOTION_256B = 3


def describe_matrix(address: int, rows: int, columns: int, dtype: str, box_rows: int, box_bytes: int = 128) -> bytes:
    """Return :func:`describe_tensor` of a contiguous matrix, for boxes of ``box_rows`` x ``box_bytes``."""
    columns_of_box = box_bytes // _DATA_TYPES[dtype][1]
    return describe_tensor(address, dtype, (columns, rows), (columns,), (columns_of_box, box_rows))


@functools.lru_cache(maxsize=4096)
def describe_tensor(
    address: int, dtype: str, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> bytes:
    """Make a CUtensorMap of up to five dimensions, nearest first, for boxes of 64 or 128 bytes in that one, swizzled.

    Parameters
    ----------
    address : a multiple of 16
    dtype : ``str`` of torch.float16, torch.bfloat16 or torch.float8_e4m3fn
    sizes : of the tensor
    strides : elements from one to the next in every dimension but the first, whose bytes are multiples of 16
    box : sizes of a box
    """
    data_type, item_bytes = _DATA_TYPES[dtype]
    rank = len(sizes)
    room = ctypes.create_string_buffer(128 + 64)
    start = ctypes.addressof(room) + -ctypes.addressof(room) % 64  # the driver wants it aligned
    status = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(start),
        data_type,
        rank,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*(item_bytes * stride for stride in strides)),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*(1,) * rank),
        0,
        _SWIZZLES[item_bytes * box[0]],
        _L2_PROMOTION_256B,
        0,
    )
    _check(status, f"describing a tensor of {' x '.join(map(str, sizes))}")
    return ctypes.string_at(start, 128)


@functools.cache
def load_kernel(source: str, name: str, defines: tuple[tuple[str, int], ...], shared_bytes: int, device: int) -> Kernel:
    """Compile and load once per process and device; threads that ask for the same one take turns."""
    import torch

    with _compiling, torch.cuda.device(device):
        torch.cuda.current_stream().query()  # makes sure that the device's context exists
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}" + ("a" if major == 9 else "")
        return Kernel(compile_cubin(source, dict(defines), arch), name, shared_bytes)
