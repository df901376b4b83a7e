"""Makes torch.cuda use the emulated devices: call `install()` before the first use."""

import faulthandler
import importlib.util
import inspect
import os
from types import SimpleNamespace
from typing import Any

import torch


def _load() -> Any:
    torch.distributed.is_available()  # registers its classes with pybind first
    path = os.environ["EMULATED_CUDA"]
    spec = importlib.util.spec_from_file_location("emulated_cuda", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _resizes(before, on_cuda):
    def resize_(self, size):
        if self.device.type != "cuda":
            return before(self, size)
        on_cuda(self, size)
        return self

    return resize_


class _Stream(torch.Stream):
    """The base class of torch.cuda.Stream."""

    def __new__(cls, priority=0, stream_id=None, device_index=0, device_type=1, stream_ptr=None):
        if stream_id is None:
            return super().__new__(cls, device=torch.device("cuda", torch.cuda.current_device()))
        return super().__new__(
            cls, stream_id=stream_id, device_index=device_index, device_type=device_type
        )

    @property
    def cuda_stream(self):
        return self.stream_id

    @property
    def priority(self):
        return 0

    @staticmethod
    def priority_range():
        return (0, -5)


class _Event(torch.Event):
    """The base class of torch.cuda.Event."""

    times: bool

    def __new__(cls, enable_timing=False, blocking=False, interprocess=False, external=False):
        event = super().__new__(cls, device="cuda", enable_timing=enable_timing, blocking=blocking)
        event.times = enable_timing
        return event

    def elapsed_time(self, other):
        if not (self.times and other.times):
            raise RuntimeError("CUDA error: invalid resource handle: both events must time")
        return vars(torch.cuda)["emulated"].elapsed_time(self.event_id, other.event_id)


def _memory_stats(of):
    result = torch._C._accelerator_getDeviceStats(of)
    result.setdefault("num_alloc_retries", 0)
    return result


def _snapshot(blocks: list[tuple[int, int, int, int, bool]]) -> dict[str, Any]:
    """Return a snapshot like torch.cuda.memory._snapshot; each block is a segment."""
    segments = []
    for device, address, size, stream, is_used in blocks:
        used = size if is_used else 0
        state = "active_allocated" if is_used else "inactive"
        block = {"address": address, "size": size, "requested_size": used, "state": state}
        whole = {"device": device, "address": address, "total_size": size, "stream": stream}
        sizes = {"allocated_size": used, "active_size": used, "requested_size": used}
        more = {"segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": False}
        more |= {"frames": [], "blocks": [{**block, "frames": []}]}
        segments.append({**whole, **sizes, **more})
    return {"segments": segments, "device_traces": [[]], "allocator_settings": {}}


def _replace_varlen() -> None:
    """Replace packed attention by attention per document; check arguments as the kernel does."""
    module: Any = importlib.import_module("torch.nn.attention.varlen")
    signature = inspect.signature(module.varlen_attn)

    def varlen_attn(query: Any, key: Any, value: Any, *options: Any, **more: Any) -> Any:
        arguments = signature.bind(query, key, value, *options, **more).arguments
        ends = arguments["cu_seq_q"]
        assert query.is_cuda
        assert (query.dtype in (torch.bfloat16, torch.float16), query.ndim) == (True, 3)
        assert (ends.dtype, ends.is_cuda, ends.is_contiguous()) == (torch.int32, True, True)
        offsets, (before, after) = ends.tolist(), arguments.get("window_size", (-1, -1))
        assert (offsets[0], offsets[-1]) == (0, len(query))
        results = []
        for begin, end in zip(offsets, offsets[1:], strict=False):
            assert end - begin <= arguments["max_q"]
            q, k, v = (x[begin:end].transpose(0, 1)[None] for x in (query, key, value))
            positions = torch.arange(end - begin, device=q.device)
            apart = positions[:, None] - positions[None]
            seen = (apart >= 0 if after == 0 else apart == apart) & (
                (apart <= before) if before >= 0 else apart == apart
            )
            mixed = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=seen, enable_gqa=arguments.get("enable_gqa", False)
            )
            results.append(mixed[0].transpose(0, 1))
        return torch.cat(results)

    vars(varlen_attn)["__signature__"] = signature
    module.varlen_attn = varlen_attn


_H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3 (emulated)", major=9, minor=0, multi_processor_count=132,
    total_memory=0,
)  # fmt: skip


def install():
    """Make torch.cuda use the emulated devices."""
    if hasattr(torch.cuda, "emulated"):
        return
    faulthandler.enable()  # a host access to device memory ends the process
    dist: Any = torch.distributed
    c10d: Any = importlib.import_module("torch.distributed.distributed_c10d")

    c = _load()
    _H100.total_memory = c.memory_info(0)[1]
    functions = {
        "_has_cuda": True, "_CudaStreamBase": _Stream, "_CudaEventBase": _Event,
        "_cuda_getDeviceCount": c.device_count, "_cuda_getDevice": c.get_device,
        "_cuda_setDevice": c.set_device, "_cuda_exchangeDevice": c.exchange_device,
        "_cuda_maybeExchangeDevice": c.exchange_device, "_cuda_getCurrentStream": c.current_stream,
        "_cuda_getCurrentRawStream": lambda d: c.current_stream(d)[0],
        "_cuda_getDefaultStream": lambda d: (0, d, 1), "_cuda_setStream": c.set_stream,
        "_cuda_synchronize": c.synchronize, "_cuda_sleep": c.sleep, "_cuda_init": lambda: None,
        "_cuda_getArchFlags": lambda: "sm_90", "_cuda_canDeviceAccessPeer": lambda a, b: True,
        "_cuda_ipc_collect": lambda: None, "_cuda_set_sync_debug_mode": c.set_sync_debug,
        "_cuda_get_sync_debug_mode": c.get_sync_debug, "_cuda_emptyCache": c.empty_cache,
        "_cuda_memoryStats": _memory_stats,
        "_cuda_resetPeakMemoryStats": torch._C._accelerator_resetPeakStats,
        "_cuda_resetAccumulatedMemoryStats": torch._C._accelerator_resetAccumulatedStats,
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_isCurrentStreamCapturing": lambda: False, "_cuda_getCompiledVersion": lambda: 13000,
        "_cuda_record_memory_history": lambda *_, **__: None,
        "_cuda_memorySnapshot": lambda *_: _snapshot(c.memory_blocks()),
    }  # fmt: skip
    for name, value in functions.items():
        setattr(torch._C, name, value)
    # Prefer CPU kernels to kernels for all devices, so that values equal those of the CPU.
    result = map(torch._C._dispatch_get_registrations_for_dispatch_key, ("CPU", "CUDA"))
    names = {each for of_key in result for each in of_key if each.startswith("aten::")}
    c.install_operators(sorted(each.removeprefix("aten::") for each in names))
    cuda: Any = torch.cuda
    streams = importlib.reload(torch.cuda.streams)  # its classes inherit the new bases
    cuda.Stream, cuda.Event = streams.Stream, streams.Event
    cuda.ExternalStream = streams.ExternalStream
    cuda._exchange_device = c.exchange_device
    cuda._maybe_exchange_device = lambda index: c.exchange_device(index)  # Dynamo needs two objects
    cuda._lazy_init = lambda: None
    cuda._initialized = True
    cuda._get_device_properties = lambda _: _H100
    cuda._device_count_nvml = cuda._raw_device_count_nvml = lambda: -1
    cuda._is_compiled = lambda: True
    cuda.default_generators = tuple(map(c.generator, range(c.device_count())))
    cuda.memory.mem_get_info = cuda.mem_get_info = lambda device=None: c.memory_info(
        cuda._utils._get_device_index(device, optional=True)
    )
    cuda.is_bf16_supported = lambda including_emulation=True: True
    cuda.is_current_stream_capturing = cuda.graphs.is_current_stream_capturing = lambda: False
    cuda.nccl.version = lambda: (2, 28, 9)
    torch.backends.cudnn.version.__globals__["_init"] = lambda: False  # there is no cuDNN
    torch.version.cuda = "13.0"
    importlib.import_module("torch._meta_registrations")  # kernels that return shapes

    for module in (c10d, dist):
        module.ProcessGroupNCCL = c.ProcessGroupNCCL
    c10d._NCCL_AVAILABLE = True
    c10d.default_pg_nccl_timeout = c10d.default_pg_timeout
    storage: Any = torch.UntypedStorage
    storage.resize_ = _resizes(storage.resize_, c.resize_storage)
    _replace_varlen()
    cuda.emulated = c
