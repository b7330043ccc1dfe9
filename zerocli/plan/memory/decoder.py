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

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zerocli.layout.ranges import parse_ranges
from zerocli.plan.blocks.shape import Latent, Parameter, Shape
from zerocli.plan.memory.column_sums import column_sums_nbytes
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
        self.queries = batch.tokens * (shape.width_q // batch.tp) * batch.width
        self.keys = batch.tokens * (shape.width_kv // batch.tp) * batch.width
        self.groups = shape.heads // (shape.kv_heads or shape.heads)
        windows = 1 if 0 < shape.window < batch.seq else 0
        some = windows and len(parse_ranges(shape.window_layers)) not in (0, shape.layers)
        self.masks = windows + (1 if batch.packed and (some or not windows) else 0)
        """Number of different masks: with a window, and of packed rows without one."""
        self._embed, self._head = (self._gradients(each()) for each in (shape.embed_parameters, shape.head_parameters))
        self._blocks = {shape.is_sparse(at): self._gradients(shape.block_parameters(at)) for at, _ in shape.runs}
        """Of a block of each kind: sparse or not."""

    def _gradients(self, parameters: Iterable[Parameter]) -> dict[str, int]:
        """Return the bytes of the gradient of each parameter that is trained, by name."""
        sizes = {each.name: math.prod(each.local(self.batch.tp)) for each in parameters if each.trainable}
        return {name: numel * self.batch.width for name, numel in sizes.items() if numel}

    @property
    def mask_scratch(self) -> int:
        """Bytes of what a mask is made of: where attention may look, a byte per pair of tokens."""
        rows = self.batch.batch if self.batch.packed else 0
        return (1 + rows) * self.batch.seq**2 if self.masks else 0

    def shared_inputs(self) -> list[int]:
        """Return the bytes of what all blocks read besides their input: masks; positions and the tables at them."""
        batch, shape = self.batch, self.shape
        masks = [(batch.batch if batch.packed else 1) * batch.seq**2 * batch.width] * self.masks
        tables = [2 * batch.tokens * shape.head_size * FP32] if batch.packed and shape.rotary else []
        return [*masks, *tables, *([8 * batch.tokens] if batch.packed else [])]

    def embed(self, t: Tape) -> Tensor:
        """Look up the tokens."""
        return _Part(self, t, 0, self._embed).embed()

    def block(self, t: Tape, x: Tensor, block: int, unit: int) -> Tensor:
        return _Block(self, t, unit, self._blocks[self.shape.is_sparse(block)], self.shape.is_sparse(block)).run(x)

    def final_norm(self, t: Tape, x: Tensor, unit: int) -> Tensor:
        return _Part(self, t, unit, self._head).norm(x, "norm")


class _Part:
    """The operations of one unit, on a tape."""

    def __init__(self, model: Decoder, t: Tape, unit: int, gradients: dict[str, int]) -> None:
        self.model, self.t, self.unit, self.gradients = model, t, unit, gradients
        self.shape, self.batch = model.shape, model.batch

    def params(self, *names: str) -> list[int]:
        """Return the bytes of the gradients of those parameters that are there and trained."""
        return [self.gradients[name] for name in names if name in self.gradients]

    def norm(self, x: Tensor, name: str) -> Tensor:
        return self.norm_rows(x, self.batch.tokens, self.shape.hidden, self.params(name, f"{name}_bias"))

    def norm_rows(self, x: Tensor, rows: int, width: int, params: list[int]) -> Tensor:
        t, nbytes, fp32 = self.t, rows * width * self.batch.width, rows * width * FP32
        if self.shape.norm == "rms" and not self.batch.cuda:
            half = self.batch.width < FP32
            source = t.new(fp32) if half else x.storage
            rstd, normal = t.new(rows * FP32), t.new(fp32)
            saved = [source, rstd, normal] if params else [source, rstd]
            # In half precision backward has four arrays beside the source: of a trained norm one is the saved one.
            temporary = (4 if half and not params else 3) * fp32
            return t.op("norm", [x], nbytes, saved, [nbytes], fp32, temporary, params, self.unit)
        stats = rows * (FP32 if self.batch.cuda else self.batch.width) * (1 if self.shape.norm == "rms" else 2)
        return t.op("norm", [x], nbytes, [x.storage, t.new(stats)], [nbytes], params=params, unit=self.unit)

    def dropout(self, x: Tensor) -> Tensor:
        """Apply dropout: a GPU's one kernel makes a mask of bytes too, a CPU draws the scale factors before."""
        return self.dropped(x, self.batch.tokens * self.shape.hidden) if self.shape.dropout else x

    def dropped(self, x: Tensor, numel: int) -> Tensor:
        mask, nbytes = self.t.new(numel * (1 if self.batch.cuda else self.batch.width)), numel * self.batch.width
        return self.t.op("dropout", [x], nbytes, [mask], [nbytes], late=self.batch.cuda)

    def embed(self) -> Tensor:
        """Look up the tokens; the table's gradient is dense."""
        shape, batch, t, hidden = self.shape, self.batch, self.t, self.model.hidden
        indices = t.new(8 * batch.tokens)
        root, places = Tensor(indices), None
        if shape.positions:  # a slice of the table, whose gradient is of the whole
            places = t.op("positions", [], 0, params=self.params("positions"), unit=0)
        table = self.params("tokens", "project_in")
        last = self._grouping(shape.local_vocab(batch.tp), shape.embed_dim or shape.hidden)
        x = t.op("embedding", [root], hidden, [indices], [SHARED], params=table, unit=0, last=last)
        if shape.local_vocab(batch.tp) != shape.vocab:
            # Tokens of other ranks give zeros; the sum over ranks is in place.
            mask = t.new(batch.tokens)
            x = t.op("other ranks' tokens", [x], hidden, [mask], [hidden])
        if places is not None:
            sums = batch.seq * shape.hidden * batch.width
            x = t.op("add positions", [x, places], hidden, (), [SHARED, sums])
        if shape.embed_norm:
            x = self.norm(x, "embed_norm")
        return self.dropout(x)

    def _grouping(self, vocab: int, hidden: int) -> int:
        """Return what a GPU allocates to sum the gradients of equal tokens: ids are sorted, twice and with their order.

        Of more than `UNSORTED` tokens it sums groups of ten first, in fp32.
        """
        tokens = self.batch.tokens
        if not self.batch.cuda:
            return 0
        groups = tokens // 10 + min(tokens, vocab) if tokens > UNSORTED else 0
        return 4 * 8 * tokens + groups * hidden * FP32


class _Block(_Part):
    """The operations of one block."""

    def __init__(self, model: Decoder, t: Tape, unit: int, gradients: dict[str, int], sparse: bool) -> None:
        super().__init__(model, t, unit, gradients)
        self.sparse = sparse

    def run(self, x: Tensor) -> Tensor:
        """Run the block; the norms of every arrangement but `pre` are an estimate: no built-in model has it."""
        norms = self.shape.norms
        if norms == "shared":
            y = self.norm(x, "norm1")
            return self.add(self.add(x, self.attention(y)), self.mlp(y))
        if norms == "parallel":
            attended = self.add(x, self._attend_normed(x))
            return self.add(attended, self.mlp(self.norm(x, "norm2")))
        if norms == "post":
            x = self.add(x, self.norm(self.attention(x), "norm1"))
            return self.add(x, self.norm(self.mlp(x), "norm2"))
        if norms == "sandwich":
            x = self.add(x, self.norm(self._attend_normed(x), "norm2"))
            y = self.mlp(self.norm(x, "norm3"))
            return self.add(x, self.norm(y, "norm4"))
        x = self.add(x, self._attend_normed(x))
        return self.add(x, self.mlp(self.norm(x, "norm2")))

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return self.t.op("residual", [x, y], self.model.hidden, grads=[SHARED, SHARED])

    def _attend_normed(self, x: Tensor) -> Tensor:
        y = self.norm(x, "norm1")
        return self.attention(y)

    # -- projections -----------------------------------------------------------------------------------------------

    def linear(self, name: str, x: Tensor, inputs: int, outputs: int) -> Tensor:
        """Run a projection of all tokens, with its bias if there is one."""
        tokens, width = self.batch.tokens, self.batch.width
        grad, nbytes = tokens * inputs * width, tokens * outputs * width
        return self._project(name, x, tokens, grad, nbytes, self.params(name), self.params(f"{name}_bias"))

    def _project(
        self, label: str, x: Tensor, rows: int, grad: int, nbytes: int, weight: Sizes, bias: Sizes = ()
    ) -> Tensor:
        """Multiply rows with a matrix: `nbytes` of output, `grad` bytes of the input's gradient.

        `weight` and `bias` are what their gradients take, if they have any.
        """
        params, last = [*weight, *bias], self._summing(rows, bias)
        # The input is saved unless the weight is frozen; the output layer is in the loss.
        saved = [x.storage] if self.shape.lora is None else []
        return self.t.op(label, [x], nbytes, saved, [grad], params=params, unit=self.unit, product=True, last=last)

    def _summing(self, rows: int, bias: Sizes) -> int:
        """Return what a GPU allocates to sum the rows of an output's gradient into that of its bias."""
        columns = sum(bias) // self.batch.width
        return column_sums_nbytes(rows, columns) if self.batch.cuda and columns else 0

    def adapt(self, y: Tensor, x: Tensor, *names: str) -> Tensor:
        """Add the adapters of these projections, which are one matrix with output `y`."""
        lora, t, unit = self.shape.lora, self.t, self.unit
        names = self.shape.matrices(*names)
        if lora is None or not (chosen := lora.of(names)):
            return y
        tokens, width = self.batch.tokens, self.batch.width
        inputs, rank = self.shape.projections()[names[0]][0], lora.rank * len(chosen)
        outputs = sum(self.shape.projections()[name][1] for name in names)
        a, b = (self.params(*(f"{name}.{end}" for name in chosen)) for end in "ab")
        grad, thin = tokens * inputs * width, tokens * lora.rank * width
        if lora.dropout:
            lows = []
            for each in a:
                given = self.dropped(x, tokens * inputs)
                saved, params = [given.storage], [each]
                lows.append(t.op("adapter", [given], thin, saved, [grad], params=params, unit=unit, product=True))
                del saved
                del given
            shared = [SHARED] * len(lows)
            low = lows.pop() if len(lows) == 1 else t.op("join", lows, tokens * rank * width, grads=shared)
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

    def _sum_out(self, y: Tensor, bias: list[int]) -> Tensor:
        """Sum an output over tensor-parallel ranks in place; its bias is added afterwards, out of place."""
        if self.batch.tp == 1 or not bias:
            return y
        last = self._summing(self.batch.tokens, bias)
        return self.t.op("bias", [y], self.model.hidden, grads=[SHARED], params=bias, unit=self.unit, last=last)

    # -- attention -------------------------------------------------------------------------------------------------

    def attention(self, x: Tensor) -> Tensor:
        shape, tp, batch = self.shape, self.batch.tp, self.batch
        if shape.latent:
            q, k, v = self._latent(x, shape.latent)
        else:
            y = self.linear("qkv", x, shape.hidden, (shape.width_q + 2 * shape.width_kv) // tp)
            y = self.adapt(y, x, "q", "k", "v")
            parts = self.t.split(y, self.model.queries + 2 * self.model.keys)
            del y
            q = k = v = parts
            if shape.q_norm == shape.head_size:
                q = self._rotate_normed(parts, shape.heads, "q_norm")
                k = self._rotate_normed(parts, shape.kv_heads or shape.heads, "k_norm")
            elif shape.rotary or shape.q_norm:
                q = k = self._rotate(parts)
        out = self._attend(q, k, v)
        weight, bias = self.params("out", "sinks"), self.params("out_bias")
        grad = batch.tokens * (shape.width_out // tp) * batch.width
        y = self._project("out", out, batch.tokens, grad, self.model.hidden, weight, bias if tp == 1 else ())
        y = self.adapt(y, out, "out")
        return self.dropout(self._sum_out(y, bias))

    def _latent(self, x: Tensor, latent: Latent) -> tuple[Tensor, Tensor, Tensor]:
        """Make queries, keys and values of latent attention. This is an estimate: no built-in model has it.

        Values are padded to the size of keys, as flash kernels do.
        """
        shape, tp, t, keys = self.shape, self.batch.tp, self.t, self.model.keys

        def low(name: str, rank: int, rest: int = 0) -> Tensor:
            y = self.linear(name, x, shape.hidden, rank + rest)
            nbytes, norm = self.batch.tokens * rank * self.batch.width, self.params(f"{name}_norm")
            return t.op("norm", [y], nbytes, [y.storage], [y.storage.nbytes], params=norm, unit=self.unit)

        source = low("q_a", latent.q_rank) if latent.q_rank else x
        q = self.linear("q_b", source, latent.q_rank or shape.hidden, shape.width_q // tp)
        wide = shape.heads * (latent.nope + latent.value) // tp
        kv = self.linear("kv_b", low("kv_a", latent.kv_rank, latent.rope), latent.kv_rank, wide)
        parts = t.split(kv, kv.storage.nbytes)
        q, k = t.op("rotary", [q], self.model.queries), t.op("rotary", [parts], keys, grads=[parts.storage.nbytes])
        return q, k, t.op("pad", [parts], keys, grads=[parts.storage.nbytes])

    def _rotate(self, parts: Tensor) -> Tensor:
        """Rotate (and norm) queries and keys: in fp32, rounded once; only the result is kept."""
        both = self.model.queries + self.model.keys
        wide = both * FP32 // self.batch.width
        half = self.batch.width < FP32
        if self.shape.q_norm:  # an estimate: no built-in model has norms over all heads
            params = self.params("q_norm", "k_norm")
            temporary, backward_temporary = both + wide * (2 if half else 1), 2 * wide
            saved = [self.t.new(wide)]
        else:
            # The rolled copy, and the product in fp32 where that is not the result itself.
            temporary = backward_temporary = 0 if self.batch.has_kernels else both + (wide if half else 0)
            params, saved = [], []
        # On a GPU the roll's copy of its input comes first, and is freed before the product.
        first, sizes = self.batch.cuda, (temporary, backward_temporary)
        rotated = self.t.op("rotary", [parts], both, saved, [both], *sizes, params, self.unit, output_first=first)
        return self.t.split(rotated, both)

    def _rotate_normed(self, parts: Tensor, heads: int, name: str) -> Tensor:
        """Norm each head of queries or of keys, and rotate the result."""
        rows, size = self.batch.tokens * heads // self.batch.tp, self.shape.head_size
        nbytes, wide = rows * size * self.batch.width, rows * size * FP32
        normed = self.norm_rows(parts, rows, size, self.params(name))
        if not self.shape.rotary:
            return normed
        temporary = 0 if self.batch.has_kernels else nbytes + (wide if self.batch.width < FP32 else 0)
        return self.t.op("rotary", [normed], nbytes, (), [nbytes], temporary, temporary)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, heads, t, queries = self.batch, self.shape.heads // self.batch.tp, self.t, self.model.queries
        masks, groups = self.model.masks, self.model.groups
        shared = batch.cuda and batch.width < FP32 and not masks  # kernels that read shared heads in place
        if groups > 1 and not shared:
            k, v = self._repeat(k), self._repeat(v)
        if self.shape.dropout and not batch.cuda:
            return self._attend_whole(q, k, v)
        keys = self.model.keys if k.storage is q.storage or k.storage is v.storage else k.storage.nbytes
        one = batch.tokens * heads * FP32
        if batch.cuda and (batch.width == FP32 or masks):
            one = batch.batch * heads * -(-batch.seq // 32) * 32 * FP32
        extra = 0
        if batch.cuda:
            # The sum of dq in fp32, one number per row, and keys' gradients per query head before they are summed.
            extra = batch.tokens * (self.shape.width_q // batch.tp) * FP32 + one
            extra += 2 * queries if groups > 1 and shared else 0
        new = t.new if self.shape.dropout else t.product  # what draws random numbers is recomputed
        out, stats = new(queries), new(one)
        saved = [q.storage, k.storage, v.storage, out, stats]
        if q.node is None and k.node is None and v.node is None:  # before the first adapter
            return Tensor(out)
        return Tensor(out, t.record("attention", [q, k, v], saved, [queries, keys, keys], backward_temporary=extra))

    def _repeat(self, x: Tensor) -> Tensor:
        return self.t.op("repeat heads", [x], self.model.queries, grads=[self.model.keys])

    def _attend_whole(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend with all scores materialised in fp32: the plain kernel, operation by operation."""
        t, queries, keys = self.t, self.model.queries, self.model.keys
        scores = self.batch.batch * (self.shape.heads // self.batch.tp) * self.batch.seq**2 * FP32
        wide = queries * FP32 // self.batch.width
        q, k = t.op("scale", [q], wide, grads=[queries]), t.op("scale", [k], wide, grads=[keys])
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
        out = t.op("values", [dropped, v], queries, saved, [scores, keys])
        del mask
        return out

    # -- mlp -------------------------------------------------------------------------------------------------------

    def mlp(self, x: Tensor) -> Tensor:
        if self.sparse:
            return self._experts(x)
        bias = self.params("down_bias")
        biases = self.params("up_bias"), bias if self.batch.tp == 1 else ()
        y = self._feed(x, self.batch.tokens, self.shape.mlp_hidden, self.params("up"), self.params("down"), biases)
        return self.dropout(self._sum_out(y, bias))

    def _feed(
        self, x: Tensor, tokens: int, mlp_hidden: int, up: Sizes, down: Sizes, biases: tuple[Sizes, Sizes] = ((), ())
    ) -> Tensor:
        """Run `tokens` rows through one MLP; that of experts, which no built-in model has, gates in two operations."""
        shape, width, t = self.shape, self.batch.width, self.t
        inner = mlp_hidden // self.batch.tp
        nbytes, hidden = tokens * inner * width, tokens * shape.hidden * width
        double = 2 if shape.gated else 1
        first = self._project("up", x, tokens, hidden, double * nbytes, up, biases[0])
        first = self.adapt(first, x, *(("gate", "up") if shape.gated else ("up",)))
        if shape.gated and shape.experts:
            parts = t.split(first, 2 * nbytes)
            gate = t.op("silu", [parts], nbytes, [first.storage], [nbytes])
            act = t.op("gate", [gate, parts], nbytes, [gate.storage, first.storage], [nbytes, nbytes])
            del gate
        else:
            label = "swiglu" if shape.gated else "gelu"
            act = t.op(label, [first], nbytes, [first.storage], [double * nbytes])
            del first
        y = self._project("down", act, tokens, nbytes, hidden, down, biases[1])
        return self.adapt(y, act, "down")

    def _experts(self, x: Tensor) -> Tensor:
        """Route tokens evenly to experts. This is an estimate: no built-in model is sparse."""
        shape, batch, t, hidden = self.shape, self.batch, self.t, self.model.hidden
        scores = batch.tokens * shape.experts * FP32
        visits = batch.tokens * shape.experts_per_token
        rows = visits * shape.hidden * batch.width
        router = t.op("router", [x], 2 * scores, [x.storage], [hidden], unit=self.unit)
        sent = t.op("dispatch", [x, router], rows, [router.storage], [hidden, scores])
        names = [name for name in self.gradients if name.startswith("expert")]
        up, down = (self.params(*(name for name in names if end in name)) for end in (".up", ".down"))
        out = self._feed(sent, visits, shape.expert_hidden, up, down)
        y = t.op("combine", [out], hidden, [out.storage], [rows])
        if shape.shared_hidden:
            up, down = self.params("shared.up", "shared_gate"), self.params("shared.down")
            y = self.add(y, self._feed(x, batch.tokens, shape.shared_hidden, up, down))
        return y
