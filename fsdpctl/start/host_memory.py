"""Whether the host memory of a node suffices for its workers, before they start."""

from collections.abc import Iterator

from fsdpctl.errors import UsageError
from fsdpctl.estimate.run_estimate import RunEstimate
from fsdpctl.plan.sizes import Offload
from fsdpctl.run.progress import format_bytes

# The setting that fills host memory, and what to set instead.
_OFFLOADS = {
    Offload.NONE: ("activation_checkpointing.offload=true", "a smaller train.micro_batch_size"),
    Offload.STATES: ("optimizer.offload=states", "more nodes"),
    Offload.ALL: ("optimizer.offload=all", "optimizer.offload=states or more nodes"),
}


def warnings_on_host(estimate: RunEstimate) -> Iterator[str]:
    """Yield a sentence if the workers of a node may need more host memory than it has.

    Raises:
        UsageError: If what they keep there instead of on the device is more.
    """
    limit, launch = estimate.host_limit, estimate.config.launch
    if limit is None or not estimate.lacks_host_memory:
        return
    available = f"{format_bytes(limit)} available; cluster.host_memory sets it"
    if (kept := estimate.host_states * (launch.nproc_per_node or 1)) > limit:
        where, instead = _OFFLOADS[Offload(estimate.config.optimizer.offload)]
        raise UsageError(
            f"{where}: needs {format_bytes(kept)} of host memory per node; expected {instead}, "
            f"{available}"
        )
    yield f"host memory: about {format_bytes(estimate.node_bytes)} needed per node, {available}"
