"""The data sheets of a configuration's device, network and host, from its cluster's specs."""

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache

import torch

from fsdpctl.config.clusters import ClusterConfig, gpu_by_name
from fsdpctl.config.compose import compose_config
from fsdpctl.config.schema import Config, ConfigT, Resolved
from fsdpctl.errors import UsageError
from fsdpctl.plan.attention_kernels import (
    CUDNN,
    EFFICIENT,
    FLASH,
    FLASH_KERNELS,
    KERNELS,
    PEAK_FRACTIONS,
)
from fsdpctl.plan.strategy import FSDP2, FSDPCTL
from fsdpctl.predict.hardware import SHARED_CORES, DeviceDataSheet, HostDataSheet, RingNetwork
from fsdpctl.resolve.attention_kernel import kernel_of
from fsdpctl.resolve.machine import LOCAL, with_cluster_ranks

ASSUMED = "assumed"  # the first word of a spec source if the specs are of other hardware
_ASSUMED_GPU = "h100"
_CPU_CLUSTER = "cpu"
_NOT_SPECS = ("name", "memory", "host_memory", "ranks_per_node", "price")  # keys of a cluster
_TERA, _GIGA = 1e12, 1e9
_STEP_OVERHEAD = 0.015  # seconds: data loading, hooks, and waits of the host
_DEFAULT_ARCHITECTURE = "hopper"  # assumed for unknown GPUs
# Efficiencies of grouped products and of indexing in layers of experts, by published steps.
_EXPERT_EFFICIENCY = {
    "hopper": {"grouped_efficiency": 0.78, "index_efficiency": 0.3},
    "blackwell": {"grouped_efficiency": 0.78},
}
# Share of NVLink that FSDP's collectives reach during computation, by published steps.
_NVLINK_EFFICIENCY = {"blackwell": 0.28}
# Seconds of the host for each pass of a unit, without its operators: FSDP2 by published steps of
# small models; fsdpctl by the ratio of both in benchmarks/results/host-time.json.
_UNIT_OVERHEAD = {FSDP2: 1.1e-3, FSDPCTL: 0.45e-3}
# Relative gain of attention over long sequences, by four published steps with 2**20 tokens.
_LONG_SEQUENCE_GAIN = {"hopper": {CUDNN: 0.14}}
# TF32 FLOP/s relative to bf16 FLOP/s, by the data sheets of NVIDIA's GPUs since the A100 (312 and
# 156 TFLOP/s). GPUs without TF32 are older, and their fp32 FLOP/s exceed this share.
_TF32_SHARE = 1 / 2
_FP32_SHARE = 1 / 16  # fp32 FLOP/s relative to bf16 FLOP/s, unless cluster.flops_fp32 is set


def device_of(config: Resolved) -> DeviceDataSheet:
    """Return the data sheet of the device; UsageError if the cluster's specs are incomplete."""
    cluster = config.cluster
    if cluster.flops is None or cluster.memory_bandwidth is None:
        raise _missing_specs(cluster, "cluster.flops and cluster.memory_bandwidth")
    architecture, kernel = cluster.architecture or _DEFAULT_ARCHITECTURE, str(kernel_of(config))
    bf16 = cluster.flops * _TERA
    fp32 = bf16 * _FP32_SHARE if cluster.flops_fp32 is None else cluster.flops_fp32 * _TERA
    attention, tf32 = _attention_efficiency(config), max(fp32, bf16 * _TF32_SHARE)
    if config.uses_tf32:
        # TF32 speeds up matrix products, not the float32 kernels of attention.
        attention = {name: share * fp32 / tf32 for name, share in attention.items()}
    return DeviceDataSheet(
        {2: bf16, 4: tf32 if config.uses_tf32 else fp32},
        cluster.memory_bandwidth * _GIGA,
        matmul_efficiency=cluster.matmul_efficiency,
        attention_efficiency=attention,
        step_efficiency=cluster.step_efficiency,
        **_EXPERT_EFFICIENCY.get(architecture, {}),
        is_compiled=config.train.compile,
        fused_dequantization=config.engine.emulated.fused_dequantization,
        step_overhead=_STEP_OVERHEAD,
        long_sequence_gain=_LONG_SEQUENCE_GAIN.get(architecture, {}).get(kernel, 0.0),
        unit_seconds=_UNIT_OVERHEAD.get(config.engine.name, 0.0),
    )


def _attention_efficiency(config: Resolved) -> Mapping[str, float]:
    cluster, kernel = config.cluster, kernel_of(config)
    shares = dict(PEAK_FRACTIONS[cluster.architecture or _DEFAULT_ARCHITECTURE])
    if cluster.attention_efficiency is not None:
        shares = dict.fromkeys(KERNELS, cluster.attention_efficiency)
    if kernel in FLASH_KERNELS and kernel in shares:
        shares[FLASH] = shares[kernel]  # the name of all versions of FlashAttention in a trace
    return {name: shares[name] for name in (FLASH, CUDNN, EFFICIENT)}


def network_of(config: Resolved) -> RingNetwork:
    """Return the network; UsageError if the cluster's specs are incomplete."""
    cluster = config.cluster
    if cluster.intra_bandwidth is None or cluster.inter_bandwidth is None:
        raise _missing_specs(cluster, "cluster.intra_bandwidth and cluster.inter_bandwidth")
    network = RingNetwork(cluster.intra_bandwidth * _GIGA, cluster.inter_bandwidth * _GIGA)
    efficiency = _NVLINK_EFFICIENCY.get(cluster.architecture or "")
    return network if efficiency is None else replace(network, nvlink_efficiency=efficiency)


def host_of(config: Resolved) -> HostDataSheet:
    cluster, ranks = config.cluster, config.launch.nproc_per_node
    assert ranks is not None
    bandwidths = cluster.host_bandwidth * _GIGA, cluster.pcie_bandwidth * _GIGA
    slowdown = SHARED_CORES if config.launch.device == "cpu" else 0.0
    return HostDataSheet(*bandwidths, ranks, slowdown)


def _missing_specs(cluster: ClusterConfig, keys: str) -> UsageError:
    return UsageError(f"cluster={cluster.name}: {keys} required; set them, or cluster=NAME")


def with_specs(config: ConfigT) -> tuple[ConfigT, str]:
    """Return a configuration with complete hardware specs, and the source of the specs.

    A named cluster has specs. For this machine, specs come from the settings, then from the cluster
    with the same GPUs. Otherwise they are assumed, which is only good enough to rank candidates.
    """
    config = with_cluster_ranks(config)
    cluster = config.cluster
    if cluster.name != LOCAL:
        return config, f"specs of cluster={cluster.name}"
    if config.launch.device != "cpu":
        specs, source = _specs_of_this_gpu()
    else:
        specs = _cluster_named(_CPU_CLUSTER)
        source = "specs as set" if cluster.flops else f"{ASSUMED} CPU specs"
    return replace(config, cluster=_with_missing(config, specs)), source


def gpu_of(config: Resolved) -> str:
    """Return the name of the cluster; for this machine, of the cluster in conf/ or of the GPU."""
    if config.cluster.name != LOCAL or not torch.cuda.is_available():
        return config.cluster.name
    gpu = gpu_by_name(name := torch.cuda.get_device_name(0))
    return name if gpu is None else gpu.cluster


def _with_missing(config: Config, specs: ClusterConfig) -> ClusterConfig:
    """Return the cluster of a configuration, with the values of `specs` for unset keys."""
    cluster, default = config.cluster, ClusterConfig()
    names = (each.name for each in fields(cluster) if each.name not in _NOT_SPECS)
    names = (name for name in names if not config.is_typed(f"cluster.{name}"))
    missing = (name for name in names if getattr(cluster, name) == getattr(default, name))
    return replace(cluster, **{name: getattr(specs, name) for name in missing})


def _specs_of_this_gpu() -> tuple[ClusterConfig, str]:
    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    gpu = gpu_by_name(name)
    if gpu is not None:
        return _cluster_named(gpu.cluster), f"specs of cluster={gpu.cluster}, for {name}"
    return _cluster_named(_ASSUMED_GPU), f"{ASSUMED} specs of cluster={_ASSUMED_GPU}, for {name}"


@cache
def _cluster_named(name: str) -> ClusterConfig:
    return compose_config([f"cluster={name}"]).config.cluster
