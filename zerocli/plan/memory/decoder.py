"""A decoder's forward pass as operations on a tape: the same calls, locals and lifetimes as in `zerocli.models`.

What each operation saves and allocates differs between devices; both are facts of torch's kernels:

- LayerNorm keeps its input and two numbers per token. RMSNorm does so on a GPU; on a CPU torch composes it of simple
  operations, which keep the input and the normalised input in fp32.
- Attention keeps queries, keys, values, output and one fp32 number per head and token (flash kernels). With fewer
  key heads than query heads, half-precision GPU kernels read them in place; otherwise keys and values are repeated.
- A mask (sliding windows shorter than the sequence, packed documents) is made once per forward and shared by blocks; on
  a GPU it needs repeated keys and values.
- On a CPU attention with dropout falls back to a kernel that keeps scores of seq x seq.
- SwiGLU keeps its input and rotary positions keep nothing, everywhere. In half precision on a GPU both are Triton
  kernels (`zerocli.models.kernels`), which allocate only their output: plans for GPUs assume that triton is installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from zerocli.layout.ranges import parse_ranges
from zerocli.plan.blocks.shape import Latent, Parameter, Shape
from zerocli.plan.memory.column_sums import column_sums_nbytes
from zerocli.plan.memory.ledger import Storage
from zerocli.plan.memory.tape import SHARED, Tape, Tensor

FP32 = 4
UNSORTED = 3072
"""Up to this many tokens, the kernel for the gradient of an embedding on a GPU adds one after the other."""
Sizes = Sequence[int]
"""Bytes of the gradients of some parameters."""


@dataclass(frozen=True)
class Batch:
    """What one micro-step computes, on which kind of device, split over how many tensor-parallel ranks."""

    batch: int
    seq: int
    width: int
    """Bytes of an element in the compute dtype."""
    cuda: bool = True
    tp: int = 1
    packed: bool = False
    """Whether rows hold several documents, which attention does not cross."""

    @property
    def tokens(self) -> int:
        return self.batch * self.seq

    @property
    def has_kernels(self) -> bool:
        """Whether the models' own kernels run, as `zerocli.models.fused` chooses them."""
        return self.cuda and self.width < FP32


class Decoder:
    """The operations of one rank's model; unit 0 is embedding (and head, if tied), then the blocks, then the head."""

    def __init__(self, shape: Shape, batch: Batch) -> None:
        self.shape, self.batch = shape, batch
        self.hidden = batch.tokens * shape.hidden * batch.width
        """Bytes of the residual stream."""
        self._queries = batch.tokens * (shape.width_q // batch.tp) * batch.width
        self._keys = batch.tokens * (shape.width_kv // batch.tp) * batch.width
        self._groups = shape.heads // (shape.kv_heads or shape.heads)
        self._kinds = {shape.is_sparse(block): block for block, _ in shape.runs}
        """A block of each kind: sparse or not."""
        windows = 1 if 0 < shape.window < batch.seq else 0
        some = windows and len(parse_ranges(shape.window_layers)) not in (0, shape.layers)
        self._masks = windows + (1 if batch.packed and (some or not windows) else 0)
        """Number of different masks: with a window, and of packed rows without one."""

    @property
    def mask_scratch(self) -> int:
        """Bytes of what a mask is made of: where attention may look, a byte per pair of tokens."""
        rows = self.batch.batch if self.batch.packed else 0
        return (1 + rows) * self.batch.seq**2 if self._masks else 0

    def shared_inputs(self) -> list[int]:
        """Return the bytes of what all blocks read besides their input: masks; positions and the tables at them."""
        batch, shape = self.batch, self.shape
        masks = [(batch.batch if batch.packed else 1) * batch.seq**2 * batch.width] * self._masks
        tables = [2 * batch.tokens * shape.head_size * FP32] if batch.packed and shape.rotary else []
        return [*masks, *tables, *([8 * batch.tokens] if batch.packed else [])]

    # -- parts -----------------------------------------------------------------------------------------------------

    @cached_property
    def _sizes(self) -> dict[str, dict[str, list[int]]]:
        """Bytes of the gradients of each parameter, by unit and name."""
        shape = self.shape
        units = {"embed": shape.embed_parameters(), "head": shape.head_parameters()}
        units |= {f"block{block}": shape.block_parameters(block) for block, _ in shape.runs}
        return {unit: {each.name: self._nbytes(each) for each in parameters} for unit, parameters in units.items()}

    def _nbytes(self, *parameters: Parameter) -> list[int]:
        width, tp = self.batch.width, self.batch.tp
        sizes = [width * _product(each.local(tp)) for each in parameters if each.trainable]
        return [size for size in sizes if size]

    def _params(self, unit: str, *names: str, block: int = 0) -> list[int]:
        sizes = self._sizes[f"block{self._kinds[self.shape.is_sparse(block)]}" if unit == "block" else unit]
        return [nbytes for name in names for nbytes in sizes.get(name, ())]

    def norm(self, t: Tape, x: Tensor, params: list[int], unit: int) -> Tensor:
        return self._norm_rows(t, x, self.batch.tokens, self.shape.hidden, params, unit)

    def _norm_rows(self, t: Tape, x: Tensor, rows: int, width: int, params: list[int], unit: int) -> Tensor:
        nbytes, fp32 = rows * width * self.batch.width, rows * width * FP32
        if self.shape.norm == "rms" and not self.batch.cuda:
            half = self.batch.width < FP32
            source = t.new(fp32) if half else x.storage
            rstd, normal = t.new(rows * FP32), t.new(fp32)
            saved = [source, rstd, normal] if params else [source, rstd]
            # In half precision backward has four arrays beside the source: of a trained norm one is the saved one.
            temporary = (4 if half and not params else 3) * fp32
            return t.op("norm", [x], nbytes, saved, [nbytes], fp32, temporary, params, unit)
        stats = rows * (FP32 if self.batch.cuda else self.batch.width) * (1 if self.shape.norm == "rms" else 2)
        return t.op("norm", [x], nbytes, [x.storage, t.new(stats)], [nbytes], params=params, unit=unit)

    def linear(
        self, t: Tape, label: str, x: Tensor, inputs: int, outputs: int, weight: Sizes, unit: int, bias: Sizes = ()
    ) -> Tensor:
        """Run a projection of all tokens; `weight` and `bias` are what their gradients take, if they have any."""
        tokens, width = self.batch.tokens, self.batch.width
        return self._project(t, label, x, tokens, tokens * inputs * width, tokens * outputs * width, weight, unit, bias)

    def _project(
        self, t: Tape, label: str, x: Tensor, rows: int, grad: int, nbytes: int, weight: Sizes, unit: int, bias: Sizes
    ) -> Tensor:
        """Multiply rows with a matrix: `nbytes` of output, `grad` bytes of the input's gradient."""
        params, last = [*weight, *bias], self._summing(rows, bias)
        return t.op(label, [x], nbytes, self._input(x), [grad], params=params, unit=unit, product=True, last=last)

    def _summing(self, rows: int, bias: Sizes) -> int:
        """Return what a GPU allocates to sum the rows of an output's gradient into that of its bias."""
        columns = sum(bias) // self.batch.width
        return column_sums_nbytes(rows, columns) if self.batch.cuda and columns else 0

    def _input(self, x: Tensor) -> list[Storage]:
        """Return what a projection saves: its input, unless its weight is frozen."""
        return [x.storage] if self.shape.lora is None else []  # the output layer is in the loss

    def adapt(self, t: Tape, y: Tensor, x: Tensor, names: tuple[str, ...], block: int, unit: int) -> Tensor:
        """Add the adapters of these projections, which are one matrix with output `y`."""
        lora = self.shape.lora
        names = self.shape.matrices(*names)
        if lora is None or not (chosen := lora.of(names)):
            return y
        tokens, width = self.batch.tokens, self.batch.width
        inputs, rank = self.shape.projections()[names[0]][0], lora.rank * len(chosen)
        outputs = sum(self.shape.projections()[name][1] for name in names)
        a, b = ([nbytes for n in chosen for nbytes in self._params("block", f"{n}.{e}", block=block)] for e in "ab")
        grad, thin = tokens * inputs * width, tokens * lora.rank * width
        if lora.dropout:
            lows = []
            for each in a:
                given = self._dropped(t, x, tokens * inputs)
                lows.append(
                    t.op("adapter", [given], thin, [given.storage], [grad], params=[each], unit=unit, product=True)
                )
                del given
            low = (
                lows.pop() if len(lows) == 1 else t.op("join", lows, tokens * rank * width, grads=[SHARED] * len(lows))
            )
            lows.clear()
        else:
            joined = [t.new(sum(a))] if len(chosen) > 1 and x.node is not None else []
            saved = [x.storage, *joined]
            low = t.op("adapter", [x], tokens * rank * width, saved, [grad], params=a, unit=unit, product=True)
            del saved, joined
        wide = [t.new(outputs * rank * width)] if len(names) > 1 else []
        grads, spare = [SHARED, tokens * rank * width], outputs * rank * width if wide else 0
        saved = [low.storage, *wide]
        return t.op(
            "add adapters", [y, low], y.storage.nbytes, saved, grads, 0, spare, params=b, unit=unit, product=True
        )

    def sum_out(self, t: Tape, y: Tensor, bias: list[int], unit: int) -> Tensor:
        """Sum an output over tensor-parallel ranks in place; its bias is added afterwards, out of place."""
        if self.batch.tp == 1 or not bias:
            return y
        last = self._summing(self.batch.tokens, bias)
        return t.op("bias", [y], self.hidden, grads=[SHARED], params=bias, unit=unit, last=last)

    def dropout(self, t: Tape, x: Tensor) -> Tensor:
        """Apply dropout: a GPU's one kernel makes a mask of bytes too, a CPU draws the scale factors before."""
        return self._dropped(t, x, self.batch.tokens * self.shape.hidden) if self.shape.dropout else x

    def _dropped(self, t: Tape, x: Tensor, numel: int) -> Tensor:
        mask, nbytes = t.new(numel * (1 if self.batch.cuda else self.batch.width)), numel * self.batch.width
        return t.op("dropout", [x], nbytes, [mask], [nbytes], late=self.batch.cuda)

    def add(self, t: Tape, x: Tensor, y: Tensor) -> Tensor:
        return t.op("residual", [x, y], self.hidden, grads=[SHARED, SHARED])

    # -- attention -------------------------------------------------------------------------------------------------

    def attention(self, t: Tape, x: Tensor, block: int, unit: int) -> Tensor:
        shape, tp = self.shape, self.batch.tp
        if shape.latent:
            q, k, v = self._latent(t, x, shape.latent, block, unit)
        else:
            wide = (shape.width_q + 2 * shape.width_kv) // tp
            own, bias = (self._params("block", name, block=block) for name in ("qkv", "qkv_bias"))
            y = self.linear(t, "qkv", x, shape.hidden, wide, own, unit, bias)
            y = self.adapt(t, y, x, ("q", "k", "v"), block, unit)
            parts = t.split(y, self._queries + 2 * self._keys)
            del y
            q = k = v = parts
            if shape.q_norm == shape.head_size:
                q = self._rotate_normed(t, parts, shape.heads, "q_norm", block, unit)
                k = self._rotate_normed(t, parts, shape.kv_heads or shape.heads, "k_norm", block, unit)
            elif shape.rotary or shape.q_norm:
                q = k = self._rotate(t, parts, block, unit)
        out = self._attend(t, q, k, v)
        weight = self._params("block", "out", "sinks", block=block)
        bias = self._params("block", "out_bias", block=block)
        y = self.linear(t, "out", out, shape.width_out // tp, shape.hidden, weight, unit, bias if tp == 1 else ())
        y = self.adapt(t, y, out, ("out",), block, unit)
        return self.dropout(t, self.sum_out(t, y, bias, unit))

    def _latent(self, t: Tape, x: Tensor, latent: Latent, block: int, unit: int) -> tuple[Tensor, Tensor, Tensor]:
        """Make queries, keys and values of latent attention. This is an estimate: no built-in model has it.

        Values are padded to the size of keys, as flash kernels do.
        """

        def low(name: str, rank: int, rest: int = 0) -> Tensor:
            own, bias = (self._params("block", each, block=block) for each in (name, f"{name}_bias"))
            y = self.linear(t, name, x, self.shape.hidden, rank + rest, own, unit, bias)
            nbytes = self.batch.tokens * rank * self.batch.width
            norm = self._params("block", f"{name}_norm", block=block)
            return t.op("norm", [y], nbytes, [y.storage], [y.storage.nbytes], params=norm, unit=unit)

        shape, tp = self.shape, self.batch.tp
        source = low("q_a", latent.q_rank) if latent.q_rank else x
        params = self._params("block", "q_b", block=block)
        q = self.linear(t, "q_b", source, latent.q_rank or shape.hidden, shape.width_q // tp, params, unit)
        wide = shape.heads * (latent.nope + latent.value) // tp
        params = self._params("block", "kv_b", block=block)
        kv = self.linear(t, "kv_b", low("kv_a", latent.kv_rank, latent.rope), latent.kv_rank, wide, params, unit)
        parts = t.split(kv, kv.storage.nbytes)
        q, k = t.op("rotary", [q], self._queries), t.op("rotary", [parts], self._keys, grads=[parts.storage.nbytes])
        return q, k, t.op("pad", [parts], self._keys, grads=[parts.storage.nbytes])

    def _rotate(self, t: Tape, parts: Tensor, block: int, unit: int) -> Tensor:
        """Rotate (and norm) queries and keys: in fp32, rounded once; only the result is kept."""
        both = self._queries + self._keys
        wide = both * FP32 // self.batch.width
        half = self.batch.width < FP32
        if self.shape.q_norm:  # an estimate: no built-in model has norms over all heads
            params = self._params("block", "q_norm", "k_norm", block=block)
            temporary, backward_temporary = both + wide * (2 if half else 1), 2 * wide
            saved = [t.new(wide)]
        else:
            # The rolled copy, and the product in fp32 where that is not the result itself.
            temporary = backward_temporary = 0 if self.batch.has_kernels else both + (wide if half else 0)
            params, saved = [], []
        rotated = t.op(
            *("rotary", [parts], both, saved, [both]),
            temporary=temporary,
            backward_temporary=backward_temporary,
            params=params,
            unit=unit,
            output_first=self.batch.cuda,  # the roll's copy of its input comes first, and is freed before the product
        )
        return t.split(rotated, both)

    def _rotate_normed(self, t: Tape, parts: Tensor, heads: int, name: str, block: int, unit: int) -> Tensor:
        """Norm each head of queries or of keys, and rotate the result."""
        rows, size = self.batch.tokens * heads // self.batch.tp, self.shape.head_size
        nbytes, wide = rows * size * self.batch.width, rows * size * FP32
        normed = self._norm_rows(t, parts, rows, size, self._params("block", name, block=block), unit)
        if not self.shape.rotary:
            return normed
        temporary = 0 if self.batch.has_kernels else nbytes + (wide if self.batch.width < FP32 else 0)
        return t.op("rotary", [normed], nbytes, (), [nbytes], temporary=temporary, backward_temporary=temporary)

    def _attend(self, t: Tape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, heads = self.batch, self.shape.heads // self.batch.tp
        shared = batch.cuda and batch.width < FP32 and not self._masks  # kernels that read shared heads in place
        if self._groups > 1 and not shared:
            k, v = self._repeat(t, k), self._repeat(t, v)
        if self.shape.dropout and not batch.cuda:
            return self._attend_whole(t, q, k, v)
        keys = self._keys if k.storage is q.storage or k.storage is v.storage else k.storage.nbytes
        one = batch.tokens * heads * FP32
        if batch.cuda and (batch.width == FP32 or self._masks):
            one = batch.batch * heads * -(-batch.seq // 32) * 32 * FP32
        extra = 0
        if batch.cuda:
            # The sum of dq in fp32, one number per row, and keys' gradients per query head before they are summed.
            extra = batch.tokens * (self.shape.width_q // batch.tp) * FP32 + one
            extra += 2 * self._queries if self._groups > 1 and shared else 0
        new = t.new if self.shape.dropout else t.product  # what draws random numbers is recomputed
        out, stats = new(self._queries), new(one)
        saved = [q.storage, k.storage, v.storage, out, stats]
        if q.node is None and k.node is None and v.node is None:  # before the first adapter
            return Tensor(out)
        node = t.record("attention", [q, k, v], saved, [self._queries, keys, keys], backward_temporary=extra)
        return Tensor(out, node)

    def _repeat(self, t: Tape, x: Tensor) -> Tensor:
        return t.op("repeat heads", [x], self._queries, grads=[self._keys])

    def _attend_whole(self, t: Tape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend with all scores materialised in fp32: the plain kernel, operation by operation."""
        scores = self.batch.batch * (self.shape.heads // self.batch.tp) * self.batch.seq**2 * FP32
        wide = self._queries * FP32 // self.batch.width
        q, k = t.op("scale", [q], wide, grads=[self._queries]), t.op("scale", [k], wide, grads=[self._keys])
        mask = t.new(self.batch.seq**2 * FP32)  # until the kernel returns
        products = t.op("scores", [q, k], scores, [q.storage, k.storage], [wide, wide])
        del q, k
        weights = t.new(scores)
        soft = Tensor(weights, t.record("softmax", [products], [weights], [scores]))
        del products, weights
        dropped = t.op("dropout", [soft], scores, [t.new(scores)], [scores])
        del soft
        # Values of one sequence are read in place; those of several are copied, as are narrower ones.
        in_place = self.batch.batch == 1 and self.batch.width == FP32
        saved = [dropped.storage, v.storage if in_place else t.new(wide)]
        out = t.op("values", [dropped, v], self._queries, saved, [scores, self._keys])
        del mask
        return out

    # -- mlp -------------------------------------------------------------------------------------------------------

    def mlp(self, t: Tape, x: Tensor, block: int, unit: int) -> Tensor:
        if self.shape.is_sparse(block):
            return self._experts(t, x, block, unit)
        names = ("up", "up_bias", "down", "down_bias")
        up, up_bias, down, bias = (self._params("block", name, block=block) for name in names)
        biases = up_bias, bias if self.batch.tp == 1 else ()
        y = self._feed(t, x, self.batch.tokens, self.shape.mlp_hidden, up, down, unit, block, biases)
        return self.dropout(t, self.sum_out(t, y, bias, unit))

    def _feed(
        self, t: Tape, x: Tensor, tokens: int, mlp_hidden: int, up: Sizes, down: Sizes, unit: int, block: int,
        biases: tuple[Sizes, Sizes] = ((), ()),
    ) -> Tensor:  # fmt: skip
        """Run `tokens` rows through one MLP; that of experts, which no built-in model has, gates in two operations."""
        shape, width = self.shape, self.batch.width
        inner = mlp_hidden // self.batch.tp
        nbytes, hidden = tokens * inner * width, tokens * shape.hidden * width
        double = 2 if shape.gated else 1
        first = self._project(t, "up", x, tokens, hidden, double * nbytes, up, unit, biases[0])
        first = self.adapt(t, first, x, ("gate", "up") if shape.gated else ("up",), block, unit)
        if shape.gated and shape.experts:
            parts = t.split(first, 2 * nbytes)
            gate = t.op("silu", [parts], nbytes, [first.storage], [nbytes])
            act = t.op("gate", [gate, parts], nbytes, [gate.storage, first.storage], [nbytes, nbytes])
            del gate
        else:
            label = "swiglu" if shape.gated else "gelu"
            act = t.op(label, [first], nbytes, [first.storage], [double * nbytes])
            del first
        y = self._project(t, "down", act, tokens, nbytes, hidden, down, unit, biases[1])
        return self.adapt(t, y, act, ("down",), block, unit)

    def _experts(self, t: Tape, x: Tensor, block: int, unit: int) -> Tensor:
        """Route tokens evenly to experts. This is an estimate: no built-in model is sparse."""
        shape, batch = self.shape, self.batch
        scores = batch.tokens * shape.experts * FP32
        visits = batch.tokens * shape.experts_per_token
        rows = visits * shape.hidden * batch.width
        router = t.op("router", [x], 2 * scores, [x.storage], [self.hidden], unit=unit)
        sent = t.op("dispatch", [x, router], rows, [router.storage], [self.hidden, scores])
        names = self._sizes[f"block{self._kinds[True]}"]
        up = self._params("block", *(n for n in names if n.startswith("expert") and ".up" in n), block=block)
        down = self._params("block", *(n for n in names if n.startswith("expert") and ".down" in n), block=block)
        out = self._feed(t, sent, visits, shape.expert_hidden, up, down, unit, block)
        y = t.op("combine", [out], self.hidden, [out.storage], [rows])
        if shape.shared_hidden:
            up = self._params("block", "shared.up", "shared_gate", block=block)
            down = self._params("block", "shared.down", block=block)
            y = self.add(t, y, self._feed(t, x, batch.tokens, shape.shared_hidden, up, down, unit, block))
        return y

    # -- the whole -------------------------------------------------------------------------------------------------

    def block(self, t: Tape, x: Tensor, block: int, unit: int) -> Tensor:
        """Run one block; the norms of every arrangement but `pre` are an estimate: no built-in model has it."""
        norms = self.shape.norms
        if norms == "shared":
            y = self._norm(t, x, 1, block, unit)
            return self.add(t, self.add(t, x, self.attention(t, y, block, unit)), self.mlp(t, y, block, unit))
        if norms == "parallel":
            attended = self.add(t, x, self._attend_normed(t, x, block, unit))
            return self.add(t, attended, self.mlp(t, self._norm(t, x, 2, block, unit), block, unit))
        if norms == "post":
            x = self.add(t, x, self._norm(t, self.attention(t, x, block, unit), 1, block, unit))
            return self.add(t, x, self._norm(t, self.mlp(t, x, block, unit), 2, block, unit))
        if norms == "sandwich":
            x = self.add(t, x, self._norm(t, self._attend_normed(t, x, block, unit), 2, block, unit))
            y = self.mlp(t, self._norm(t, x, 3, block, unit), block, unit)
            return self.add(t, x, self._norm(t, y, 4, block, unit))
        x = self.add(t, x, self._attend_normed(t, x, block, unit))
        return self.add(t, x, self.mlp(t, self._norm(t, x, 2, block, unit), block, unit))

    def _norm(self, t: Tape, x: Tensor, number: int, block: int, unit: int) -> Tensor:
        return self.norm(t, x, self._params("block", f"norm{number}", f"norm{number}_bias", block=block), unit)

    def _attend_normed(self, t: Tape, x: Tensor, block: int, unit: int) -> Tensor:
        y = self._norm(t, x, 1, block, unit)
        return self.attention(t, y, block, unit)

    def _grouping(self, vocab: int, hidden: int) -> int:
        """Return what a GPU allocates to sum the gradients of equal tokens: ids are sorted, twice and with their order.

        Of more than `UNSORTED` tokens it sums groups of ten first, in fp32.
        """
        tokens = self.batch.tokens
        if not self.batch.cuda:
            return 0
        groups = tokens // 10 + min(tokens, vocab) if tokens > UNSORTED else 0
        return 4 * 8 * tokens + groups * hidden * FP32

    def embed(self, t: Tape) -> Tensor:
        """Look up the tokens; the table's gradient is dense."""
        shape, batch = self.shape, self.batch
        indices = t.new(8 * batch.tokens)
        root, places = Tensor(indices), None
        if shape.positions:  # a slice of the table, whose gradient is of the whole
            places = t.op("positions", [], 0, params=self._params("embed", "positions"), unit=0)
        table = self._params("embed", "tokens", "project_in")
        last = self._grouping(shape.local_vocab(batch.tp), shape.embed_dim or shape.hidden)
        x = t.op("embedding", [root], self.hidden, [indices], [SHARED], params=table, unit=0, last=last)
        if shape.local_vocab(batch.tp) != shape.vocab:
            # Tokens of other ranks give zeros; the sum over ranks is in place.
            mask = t.new(batch.tokens)
            x = t.op("other ranks' tokens", [x], self.hidden, [mask], [self.hidden])
        if places is not None:
            sums = batch.seq * shape.hidden * batch.width
            x = t.op("add positions", [x, places], self.hidden, (), [SHARED, sums])
        if shape.embed_norm:
            x = self.norm(t, x, self._params("embed", "embed_norm", "embed_norm_bias"), 0)
        return self.dropout(t, x)


def _product(sizes: tuple[int, ...]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total
