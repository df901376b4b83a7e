"""Whether the host memory of a node suffices for its workers, before they start."""

from collections.abc import Iterator

from fsdpctl.errors import UsageError
from fsdpctl.estimate.run_estimate import RunEstimate
from fsdpctl.plan.sizes import Offload
from fsdpctl.run.progress import format_bytes


def notes_on_host(estimate: RunEstimate) -> Iterator[str]:
    """Yield a line if the workers of a node may need more host memory than it has.

    Raises:
        UsageError: If what they keep there instead of on the device is more.
    """
    limit, launch = estimate.host_limit, estimate.config.launch
    if limit is None or not estimate.lacks_host_memory:
        return
    available = f"{format_bytes(limit)} available; cluster.host_memory sets it"
    offload = estimate.config.optimizer.offload
    if (states := estimate.host_states * (launch.nproc_per_node or 1)) > limit:
        instead = (
            "optimizer.offload=states or more nodes" if offload == Offload.ALL else "more nodes"
        )
        raise UsageError(
            f"optimizer.offload={offload}: needs {format_bytes(states)} of host memory per node; "
            f"expected {instead}, {available}"
        )
    yield (
        f"{'warning':<8}about {format_bytes(estimate.node_bytes)} of host memory needed per node, "
        f"{available}"
    )
