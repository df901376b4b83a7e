"""What is known, or else assumed, of the speed of the machine at hand."""

from dataclasses import replace
from functools import cache

import torch

from fsdpctl.config.compose import compose_config
from fsdpctl.config.files import package_folder
from fsdpctl.config.gpus import known_gpu
from fsdpctl.config.placement import ClusterConfig
from fsdpctl.config.schema import Config
from fsdpctl.resolve.machine import HERE

_ANY_GPU = "h100"
_FIGURES = (
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
# What profile-device wrote of two cores, a rank each. Other CPUs are faster or slower, but mostly
# at everything alike: operators, what they cost beside their arithmetic, and gloo.
_ANY_CPU = "cpu.json"
_GLOO = 1.0  # GB/s of a rank, roughly: it copies and adds
_CABLE = 1.25  # GB/s of a machine, where there are several: Ethernet of 10 Gb/s


def with_speed(config: Config) -> tuple[Config, str]:
    """A placed configuration with the figures that its cluster lacks, and whose they are, in words.

    Those of a described cluster are its own. For this machine they are a profile's, what is typed,
    what is known of a GPU of that name, or assumed: good enough to rank, and no more.
    """
    cluster = config.cluster
    if cluster.name != HERE:
        return config, f"the figures of cluster={cluster.name}"
    if cluster.profile is not None:
        found, whose = cluster, f"the profile {cluster.profile}"
    elif config.launch.device == "cpu" and cluster.flops is not None:
        intra = cluster.intra_bandwidth or _GLOO
        found, whose = replace(cluster, intra_bandwidth=intra), "the figures that are given"
    elif config.launch.device == "cpu":
        profile = str(package_folder("conf") / "cluster" / _ANY_CPU)
        found, whose = replace(cluster, profile=profile), "assumed figures of CPU cores"
    else:
        found, whose = _of_this_gpu()
        found = _filled(cluster, found)
    if found.inter_bandwidth is None:
        inter = _CABLE / (config.launch.nproc_per_node or 1)
        found = replace(found, inter_bandwidth=inter)
    return replace(config, cluster=found), whose


def _filled(given: ClusterConfig, found: ClusterConfig) -> ClusterConfig:
    """What is given, and what is found of the rest."""
    usual = ClusterConfig()
    lacking = (name for name in _FIGURES if getattr(given, name) == getattr(usual, name))
    return replace(given, **{name: getattr(found, name) for name in lacking})


def _of_this_gpu() -> tuple[ClusterConfig, str]:
    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    known = cluster_of_device(name)
    if known is not None:
        return _described(known), f"the figures of cluster={known}, for {name}"
    return _described(_ANY_GPU), f"assumed figures, cluster={_ANY_GPU}'s, for {name}"


def cluster_of_device(name: str) -> str | None:
    """The described cluster whose nodes have the device that torch calls `name`."""
    gpu = known_gpu(name)
    return None if gpu is None else gpu.cluster


@cache
def _described(name: str) -> ClusterConfig:
    return compose_config([f"cluster={name}"]).config.cluster
