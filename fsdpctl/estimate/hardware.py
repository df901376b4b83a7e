"""The device and the network of a configuration, by its cluster's specs or its profile."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from fsdpctl.config.schema import Config
from fsdpctl.errors import UsageError
from fsdpctl.plan.attention import CUDNN, EFFICIENT, FLASH, FLASHES, KERNELS, SHARES
from fsdpctl.predict.hardware import DataSheet
from fsdpctl.predict.network import RingNetwork
from fsdpctl.predict.profile import MeasuredDevice, MeasuredNetwork, Profile, read_profile
from fsdpctl.resolve.attention import assumed_of

_TERA, _GIGA = 1e12, 1e9
_PER_STEP = 0.015  # seconds: data loading, hooks, and waits of the host
_USUAL = "hopper"  # the assumed generation of unknown GPUs
_FP32_SHARE = 1 / 16  # of the bf16 FLOP/s, unless cluster.flops_fp32 is set


def device_of(config: Config) -> DataSheet | MeasuredDevice:
    """Return the device of a placed configuration.

    Raises:
        UsageError: If its specs are incomplete.
    """
    cluster = config.cluster
    if cluster.profile is not None:
        _check_profile(config, _profile(cluster.profile))
        return _measured(cluster.profile)
    if cluster.flops is None or cluster.memory_bandwidth is None:
        raise _unknown(config, "cluster.flops and cluster.memory_bandwidth")
    bf16 = cluster.flops * _TERA
    fp32 = bf16 * _FP32_SHARE if cluster.flops_fp32 is None else cluster.flops_fp32 * _TERA
    return DataSheet(
        {2: bf16, 4: fp32},
        cluster.memory_bandwidth * _GIGA,
        matmul=cluster.matmul_efficiency,
        attention=_attention(config),
        in_step=cluster.step_efficiency,
        fuses=config.train.compile,
        step_overhead=_PER_STEP,
    )


def _attention(config: Config) -> Mapping[str, float]:
    """Return the shares of peak FLOP/s that torch's attention operators reach."""
    cluster, kernel = config.cluster, assumed_of(config)
    shares = dict(SHARES[cluster.architecture or _USUAL])
    if cluster.attention_efficiency is not None:
        shares = dict.fromkeys(KERNELS, cluster.attention_efficiency)
    if kernel in FLASHES and kernel in shares:
        shares[FLASH] = shares[kernel]
    return {name: shares[name] for name in (FLASH, CUDNN, EFFICIENT)}


def network_of(config: Config) -> RingNetwork | MeasuredNetwork:
    """Return the network of a placed configuration.

    Raises:
        UsageError: If its specs are incomplete.
    """
    cluster, launch = config.cluster, config.launch
    inter = None if cluster.inter_bandwidth is None else cluster.inter_bandwidth * _GIGA
    if cluster.profile is not None:
        profile = _profile(cluster.profile)
        if profile.collectives:
            if launch.nnodes > 1 and inter is None:
                raise _unknown(config, "cluster.inter_bandwidth")
            assert launch.nproc_per_node is not None
            whole = None if inter is None else inter * launch.nproc_per_node
            return MeasuredNetwork(profile, whole)
    if cluster.intra_bandwidth is None or inter is None:
        raise _unknown(config, "cluster.intra_bandwidth and cluster.inter_bandwidth")
    return RingNetwork(cluster.intra_bandwidth * _GIGA, inter)


def _check_profile(config: Config, profile: Profile) -> None:
    """Check that the profile is for the device and the dtype of the configuration."""
    device, dtype = "cuda" if profile.is_cuda else "cpu", config.precision.param_dtype
    if device != config.launch.device:
        raise UsageError(
            f"cluster.profile={config.cluster.profile}: expected a profile of "
            f"{config.launch.device}, got one of {device}; set launch.device={device} to use it"
        )
    if profile.dtype != dtype:
        raise UsageError(
            f"cluster.profile={config.cluster.profile}: expected a profile in {dtype}, got one in "
            f"{profile.dtype}; set precision.param_dtype={profile.dtype} to use it"
        )


@cache
def _profile(path: str) -> Profile:
    return read_profile(Path(path))


@cache
def _measured(path: str) -> MeasuredDevice:
    return MeasuredDevice(_profile(path))


def _unknown(config: Config, missing: str) -> UsageError:
    return UsageError(
        f"cluster={config.cluster.name}: {missing} required; set them or another cluster=, or "
        "measure this machine with `fsdpctl profile-device FILE` and set cluster.profile=FILE"
    )
