"""What fits, said of a variant."""

from fsdpctl.compare.row import TOO_LARGE, Largest
from fsdpctl.config.schema import Config
from fsdpctl.errors import UsageError
from fsdpctl.estimate.estimator import Estimator
from fsdpctl.estimate.fit import FITTED, largest_that_fits
from fsdpctl.estimate.run_estimate import RunEstimate
from fsdpctl.train.progress import format_bytes


def too_large(estimate: RunEstimate) -> str:
    """The status of a variant that does not fit."""
    return (
        f"{TOO_LARGE}a rank needs {format_bytes(estimate.peak_reserved)}, of "
        f"{format_bytes(max(0, estimate.available))} that it may use"
    )


class LargestModels:
    """The largest model that fits, found once for each engine and strategy."""

    def __init__(self, estimator: Estimator) -> None:
        self._estimator = estimator
        self._found: dict[tuple[str, str], Largest | None] = {}

    def under(self, config: Config) -> Largest | None:
        """As many blocks as fit, with the other settings of the first `config` of its kind."""
        key = config.engine.name, config.strategy.name
        if key not in self._found:
            self._found[key] = self._largest(config)
        return self._found[key]

    def _largest(self, config: Config) -> Largest | None:
        try:
            fit = largest_that_fits(self._estimator, config, "model")
        except UsageError:
            return None  # it is not estimated
        assert fit.key == FITTED["model"]
        return None if fit.estimate is None else Largest(fit.estimate.num_params, fit.value)
