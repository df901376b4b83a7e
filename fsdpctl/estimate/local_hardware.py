"""The specs of this machine, as known or assumed."""

from dataclasses import replace
from functools import cache

import torch

from fsdpctl.config.compose import compose_config
from fsdpctl.config.placement import ClusterConfig, known_gpu
from fsdpctl.config.recipe import package_folder
from fsdpctl.config.schema import Config
from fsdpctl.resolve.machine import LOCAL

_ANY_GPU = "h100"
_SPECS = (
    "flops",
    "flops_fp32",
    "memory_bandwidth",
    "intra_bandwidth",
    "inter_bandwidth",
    "matmul_efficiency",
    "attention_efficiency",
    "architecture",
    "step_efficiency",
)
# A profile of two cores, a rank each. Other CPUs are faster or slower, but mostly by the same
# factor in everything: operators, their overhead, and gloo.
_ANY_CPU = "cpu.json"
_GLOO = 1.0  # GB/s per rank, roughly: gloo copies and adds
_NODE_LINK = 1.25  # GB/s per node, if there are several: 10 Gb/s Ethernet


def with_speed(config: Config) -> tuple[Config, str]:
    """Return a placed configuration with complete hardware specs, and the source of these specs.

    A specified cluster has its own. For this machine, they come from a profile, the settings, the
    cluster with the same GPUs, or assumptions that are only good enough to rank candidates.
    """
    cluster = config.cluster
    if cluster.name != LOCAL:
        return config, f"specs of cluster={cluster.name}"
    if cluster.profile is not None:
        found, whose = cluster, f"profile {cluster.profile}"
    elif config.launch.device == "cpu" and cluster.flops is not None:
        intra = cluster.intra_bandwidth or _GLOO
        found, whose = replace(cluster, intra_bandwidth=intra), "specs as set"
    elif config.launch.device == "cpu":
        profile = str(package_folder("conf") / "cluster" / _ANY_CPU)
        found, whose = replace(cluster, profile=profile), "assumed CPU specs"
    else:
        found, whose = _of_this_gpu()
        found = _filled(cluster, found)
    if found.inter_bandwidth is None:
        inter = _NODE_LINK / (config.launch.nproc_per_node or 1)
        found = replace(found, inter_bandwidth=inter)
    return replace(config, cluster=found), whose


def _filled(given: ClusterConfig, found: ClusterConfig) -> ClusterConfig:
    """Return `given`, with the specs of `found` where it has the defaults."""
    usual = ClusterConfig()
    lacking = (name for name in _SPECS if getattr(given, name) == getattr(usual, name))
    return replace(given, **{name: getattr(found, name) for name in lacking})


def _of_this_gpu() -> tuple[ClusterConfig, str]:
    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    known = cluster_of_device(name)
    if known is not None:
        return _specified(known), f"specs of cluster={known}, for {name}"
    return _specified(_ANY_GPU), f"assumed specs of cluster={_ANY_GPU}, for {name}"


def cluster_of_device(name: str) -> str | None:
    """Return the cluster whose nodes have the device that torch calls `name`; None if unknown."""
    gpu = known_gpu(name)
    return None if gpu is None else gpu.cluster


@cache
def _specified(name: str) -> ClusterConfig:
    return compose_config([f"cluster={name}"]).config.cluster
