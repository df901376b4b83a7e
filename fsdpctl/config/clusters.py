"""The section `cluster`, the hardware that estimates assume, and the GPUs of named clusters."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from fsdpctl.config.keys import auto_key, key, optional_key
from fsdpctl.config.launch import MAX_RANKS
from fsdpctl.io.packages import package_folder
from fsdpctl.io.untrusted import read_yaml
from fsdpctl.plan.attention_kernels import ARCHITECTURES

PRICE_SOURCE = "priced"  # key of a cluster's file: the source and the day of its price


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """The section `cluster`."""

    name: str = "local"
    memory: float | None = auto_key(
        "memory per rank, as torch reports the memory of a device", unit="GiB", within=(0.001, 1e6)
    )
    host_memory: float | None = auto_key(
        "host memory of a node; auto: of this machine or its control group",
        unit="GiB",
        within=(0.001, 1e6),
    )
    ranks_per_node: int | None = auto_key(
        "value of launch.nproc_per_node=auto in estimates", within=(1, MAX_RANKS)
    )
    flops: float | None = optional_key("TFLOP/s of dense matmuls in bf16", within=(1e-3, 1e6))
    flops_fp32: float | None = optional_key("TFLOP/s of dense matmuls in fp32", within=(1e-3, 1e6))
    memory_bandwidth: float | None = optional_key("GB/s of device memory", within=(1e-3, 1e6))
    intra_bandwidth: float | None = optional_key(
        "GB/s per rank within a node, per direction", within=(1e-4, 1e6)
    )
    inter_bandwidth: float | None = optional_key(
        "GB/s per rank between nodes, per direction", within=(1e-4, 1e6)
    )
    host_bandwidth: float = key(
        200.0, "GB/s of a node's host memory, which its ranks share", within=(1e-3, 1e6)
    )
    pcie_bandwidth: float = key(31.5, "GB/s between GPU and host per direction", within=(1e-4, 1e6))
    price: float | None = optional_key(
        "estimates only: USD per GPU hour; a named cluster has the price of a day", within=(0, 1e6)
    )
    architecture: str | None = auto_key(
        "GPU generation, which determines the supported attention kernels", choices=ARCHITECTURES
    )
    matmul_efficiency: float = key(
        0.73, "share of flops that large matmuls reach", within=(0.01, 1), user_key="cluster.flops"
    )
    attention_efficiency: float | None = auto_key(
        "share of flops that attention reaches; auto: by architecture and kernel", within=(0.01, 1)
    )
    step_efficiency: float = key(
        0.863,
        "speed of operators within a step, relative to their speed measured alone",
        within=(0.01, 1),
        user_key="cluster.flops",
    )


class Gpu(NamedTuple):
    """A GPU of a named cluster."""

    cluster: str
    peak_flops: float  # dense FLOP/s in bf16, from the data sheet


@cache
def gpu_by_name(device_name: str) -> Gpu | None:
    """Return the GPU with the name that torch reports; None if no named cluster has it."""
    matches = {}
    for cluster, content in _clusters():
        for name in content.get("device_names", ()):
            if re.search(rf"\b{name}\b", device_name, re.IGNORECASE):
                matches[name] = Gpu(cluster, float(content["flops"]) * 1e12)
    # The longest name is the most specific one: A100-SXM4-40GB rather than A100.
    return matches[max(matches, key=len)] if matches else None


def clusters_with_memory(size: str) -> list[str]:
    """Return the clusters whose GPUs have this nominal memory, such as 24 or 24GB."""
    digits = size.lower().rstrip("gib")
    nominal = float(digits) if digits.isdecimal() else 0.0
    # A part of the memory is reserved: torch reports up to 10% less than the nominal memory.
    memory = {cluster: float(content.get("memory", 0)) for cluster, content in _clusters()}
    return [cluster for cluster, gib in memory.items() if 0.9 * nominal < gib <= nominal]


def clusters_like(text: str) -> list[str]:
    """Return the clusters that a spelling such as A100 or H100-80GB may mean."""
    # The prefix has all digits: a100 must not suggest a10.
    gpu_match = re.search(r"[a-z]+[-_ ]?\d+", text.lower())
    text_key = re.sub(r"[-_ ]", "", text.lower())
    prefix = re.sub(r"[-_ ]", "", gpu_match[0]) if gpu_match else text_key
    similar = [x for x, _ in _clusters() if prefix and x.replace("_", "").startswith(prefix)]
    contained = [x for x in similar if all(part in text_key for part in x.split("_"))]
    return [max(contained, key=len)] if contained else similar


def price_source(cluster: str) -> str:
    """Return the source and the day of a cluster's price; empty if the file has no price."""
    file = package_folder("conf") / "cluster" / f"{cluster}.yaml"
    content: Any = read_yaml(file) or {}
    return str(content.get(PRICE_SOURCE, ""))


def _clusters() -> Iterator[tuple[str, Any]]:
    for file in sorted((package_folder("conf") / "cluster").glob("*.yaml")):
        yield file.stem, read_yaml(file) or {}
