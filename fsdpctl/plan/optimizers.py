"""One row per optimizer: its keys and states; and the memory and work of Muon's updates."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from fsdpctl.errors import UsageError
from fsdpctl.plan.layout import ALIGNMENT, FlatLayout, OptimizerSpan, ParamSpec, Span, decay_group
from fsdpctl.plan.owner_map import OwnerMap
from fsdpctl.plan.precision import SPLIT, Dtype

ADAMW, MUON = "adamw", "muon"
MATRICES = "matrices"  # the owner map that splits no matrix that Muon steps
SPLITTING_MAPS = ("even", "balanced")  # owner maps that split matrices between ranks
NS_STEPS = 5
# Elements that share a scale. Spans are multiples, so no scale block crosses parameters or ranks.
SCALE_BLOCK = ALIGNMENT
MIN_COMPRESSED = 4096  # elements: smaller parameters have float32 states
TILE = {"cpu": 1 << 17, "cuda": 1 << 22}  # elements that are stepped at a time
NUM_TILES = 4  # float32 tiles: both moments, the gradient (then the weights), and workspace
STATE_DTYPES = ("float32", "int8")
_BETAS = ("beta1", "beta2", "eps")
_FLOAT32 = 4  # bytes
_SCALE = 2  # bytes
_SCALE_BLOCK_WORK = 10  # bytes: a new scale in bf16 and in float32, and a factor


@dataclass(frozen=True, slots=True)
class OptimizerRow:
    """The keys and states of an optimizer, which `training/assemble.py` creates."""

    name: str
    keys: tuple[str, ...]  # keys of `optimizer` that not every optimizer has
    moments: int  # number of states as large as the weights
    counter: int  # bytes of a parameter's step counter
    needs_momentum: bool = False  # there are moments only if `momentum` is above 0
    has_default_lr: bool = True
    steps_matrices: bool = False  # matrices are stepped as a whole


_TABLE = (
    #            name, keys, moments, counter
    OptimizerRow(ADAMW, (*_BETAS, "state_dtype"), 2, 4),
    OptimizerRow("sgd", ("momentum",), 1, 0, needs_momentum=True, has_default_lr=False),
    OptimizerRow(MUON, (*_BETAS, "momentum", "nesterov", "ns_steps"), 2, 4, steps_matrices=True),
)
OPTIMIZERS = {row.name: row for row in _TABLE}


def get_optimizer(name: str) -> OptimizerRow:
    if name not in OPTIMIZERS:
        raise UsageError(f"optimizer={name}: not supported; expected {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]


MatrixShape = tuple[int, int, int]  # matrices, rows and columns


def uses_muon(param: ParamSpec) -> bool:
    """Return whether Muon steps a parameter: a matrix of a block, or a stack of experts' matrices.

    AdamW steps the embedding, the head, vectors, routers and convolutions.
    """
    is_matrix = len(param.shape) in (2, 3) and min(param.shape[-2:]) > 1
    return param.trainable and param.in_block and param.role == "matrix" and is_matrix


def matrix_shape(param: ParamSpec) -> MatrixShape:
    """Return the number and the shape of the matrices in a parameter."""
    count = param.shape[0] if len(param.shape) == 3 else 1
    return count, param.shape[-2], param.shape[-1]


@dataclass(frozen=True, slots=True)
class MuonSettings:
    """The settings of Muon that determine the memory and work of its updates."""

    ns_steps: int = NS_STEPS
    nesterov: bool = True

    def tensors(self, shape: MatrixShape, itemsize: int) -> Iterator[tuple[str, int]]:
        """Yield the temporary tensors of an update of masters with `itemsize`; 0 bytes: freed."""
        numel, square = prod(shape), shape[0] * min(shape[1:]) ** 2
        update, following = "update", "next update"
        # With bf16 weights, the Nesterov gradient is the update itself.
        if self.nesterov and itemsize != 2:
            yield from (("gradient", itemsize * numel), (update, 2 * numel), ("gradient", 0))
        else:
            yield update, 2 * numel
        for _ in range(self.ns_steps):
            yield from (("Gram matrix", 2 * square), ("polynomial", 2 * square), ("Gram matrix", 0))
            yield from ((following, 2 * numel), (update, 0), ("polynomial", 0))
            update, following = following, update
        yield update, 0

    def products(self, shape: MatrixShape) -> list[tuple[int, int, int, int]]:
        """Return batch, rows, columns and inner dimension of each matrix product of an update."""
        count, short, long = shape[0], min(shape[1:]), max(shape[1:])
        iteration = [(count, short, short, long), (count, short, short, short)]
        return [*iteration, (count, short, long, short)] * self.ns_steps


def muon_flops(param: ParamSpec) -> int:
    """Return the FLOPs of a parameter's update; 0 if AdamW steps it."""
    # Only the ratios matter: they are equal for any number of iterations.
    products = MuonSettings().products(matrix_shape(param)) if uses_muon(param) else ()
    return sum(2 * prod(each) for each in products)


def is_compressible(param: ParamSpec) -> bool:
    """Return whether a state dtype other than float32 applies to a parameter.

    The full parameter decides, not a rank's shard: results are the same on any number of ranks.
    """
    return param.numel >= MIN_COMPRESSED and param.role != "vector"


def span_group(param: ParamSpec, group: int | None = None) -> int:
    """Return a parameter's group for `optimizer_spans`; odd if its states may be compressed."""
    return 2 * (decay_group(param) if group is None else group) + is_compressible(param)


def scale_blocks(span: Span) -> Span:
    return Span(span.start // SCALE_BLOCK, -(-span.stop // SCALE_BLOCK))


def tile_bytes(largest: int, device: str, dtype: str | None) -> int:
    """Return the bytes to step spans of up to `largest` elements in tiles; moments have `dtype`."""
    size = min(largest, TILE[device])
    # On a GPU, the result of `torch.where` for skipped steps; on a CPU, a square root in float64.
    tiles = NUM_TILES + (2 if device == "cpu" else 1)
    blocks = size // SCALE_BLOCK * _SCALE_BLOCK_WORK if dtype == "int8" else 0
    return size * tiles * _FLOAT32 + blocks


def moment_bytes(numel: int, dtype: str) -> list[int]:
    """Return the bytes of each tensor of a moment with `numel` elements."""
    if dtype == "int8":
        return [numel, -(-numel // SCALE_BLOCK) * _SCALE]
    return [numel * Dtype(dtype).itemsize]


def tiled_dtype(requested: str | None, masters: Iterable[str]) -> str | None:
    """Return the dtype of AdamW's moments if it steps in tiles, given the dtypes of the masters.

    None: torch's kernel steps all weights, with moments in the dtype of the masters.
    """
    masters = set(masters)
    if SPLIT in masters:
        return requested or "float32"
    # Torch's kernel steps float32 masters with float32 moments.
    return None if requested == "float32" and masters == {requested} else requested


@dataclass(frozen=True, slots=True)
class OptimizerStates:
    """The optimizer states of each tensor."""

    moments: int  # number of states as large as the tensor
    counter: int  # bytes of the step counter
    muon: MuonSettings | None = None  # if set, matrices of blocks have one moment
    # Dtype of the moments of compressible parameters; the others have float32. None: all moments
    # have the dtype of the masters.
    dtype: str | None = None

    @property
    def _compresses(self) -> bool:
        return self.dtype not in (None, "float32")

    def group(self, param: ParamSpec) -> int:
        return span_group(param) if self._compresses else decay_group(param)

    def is_separate(self, param: ParamSpec) -> bool:
        return self.muon is not None and uses_muon(param)

    def of_span(self, span: OptimizerSpan, itemsize: int) -> list[int]:
        """Return the bytes of each state of a span whose weights have `master` bytes each."""
        if span.separate_param is not None:
            return [span.span.numel * itemsize]
        if self.dtype is None:
            return self.of_tensor(span.span.numel * itemsize)
        dtype = self.dtype if not self._compresses or span.group % 2 else "float32"
        counter = [self.counter] * bool(self.counter)
        return [*counter, *moment_bytes(span.span.numel, dtype) * self.moments]

    def saved(self, param: ParamSpec, itemsize: int) -> int:
        """Return the bytes of a parameter's states in a checkpoint."""
        if self.dtype is None:
            return param.numel * itemsize * (1 if self.is_separate(param) else self.moments)
        dtype = self.dtype if self._compresses and is_compressible(param) else "float32"
        return sum(moment_bytes(param.numel, dtype)) * self.moments

    def of_tensor(self, nbytes: int) -> list[int]:
        """Return the bytes of each state of a tensor with `nbytes` of master weights."""
        return [*[self.counter] * bool(self.counter), *[nbytes] * self.moments]


ADAMW_STATES = OptimizerStates(OPTIMIZERS[ADAMW].moments, OPTIMIZERS[ADAMW].counter)


def matrix_owners(layouts: Sequence[FlatLayout], num_ranks: int) -> OwnerMap:
    """Assign unsplit matrices to ranks so that the ranks' updates cost about the same.

    All parameters are put end to end, with their costs as lengths. If the line is divided evenly,
    the rank with a parameter's middle owns it. Buffers without a matrix are cut evenly.
    """
    sizes = [layout.numel for layout in layouts]
    even = OwnerMap.even(sizes, num_ranks)
    costs = [[muon_flops(param) for param in layout.params] for layout in layouts]
    total, before, spans = sum(map(sum, costs)), 0, []
    for layout, layout_costs, even_spans in zip(layouts, costs, even.spans, strict=True):
        if not any(layout_costs):
            spans.append(even_spans)
            continue
        cuts = [0] * num_ranks + [layout.numel]  # the start of each rank's span
        current = 0
        for param_span, cost in zip(layout.param_spans, layout_costs, strict=True):
            owner = min((2 * before + cost) * num_ranks // (2 * total), num_ranks - 1)
            before += cost
            for rank in range(current, owner):
                cuts[rank + 1] = param_span.span.start
            current = max(current, owner)
        for rank in range(current + 1, num_ranks):
            cuts[rank] = layout.numel
        spans.append(tuple(map(Span, cuts, cuts[1:])))
    return OwnerMap(tuple(sizes), tuple(spans))
