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

from zerocli.layout import constants
from zerocli.layout.flats import FP32
from zerocli.layout.ranges import parse_ranges
from zerocli.plan.blocks.shape import Latent, Parameter, Shape
from zerocli.plan.memory.column_sums import column_sums_nbytes
from zerocli.plan.memory.ledger import Ledger, Storage
from zerocli.plan.memory.replayable import NO_UNIT, Enter, Mark, MicroStep
from zerocli.plan.memory.tape import SHARED, TIED, Tape, Tensor
from zerocli.plan.setup import Setup

UNSORTED = 3072
"""Up to this many tokens, the kernel for the gradient of an embedding on a GPU adds one after the other."""
Sizes = Sequence[int]
"""Bytes of the gradients of some parameters."""


class Decoder(MicroStep):
    """One rank's micro-step; unit 0 is the embedding (and the head, if tied), then the blocks, then the head."""

    def __init__(self, shape: Shape, setup: Setup, ledger: Ledger) -> None:
        self.shape, self.setup, self.ledger = shape, setup, ledger
        self.tp, self.width, self.tokens = setup.tp, setup.width, setup.batch * setup.seq
        self.cuda = setup.device == "cuda"
        self.has_kernels = self.cuda and self.width < FP32
        """Whether the models' own kernels run, as `zerocli.models.fused` chooses them."""
        self.hidden = self.tokens * shape.hidden * self.width
        self.queries = self.tokens * (shape.width_q // self.tp) * self.width
        self.keys = self.tokens * (shape.width_kv // self.tp) * self.width
        windows = 1 if 0 < shape.window < setup.seq else 0
        some = windows and len(parse_ranges(shape.window_layers)) not in (0, shape.layers)
        self.masks = windows + (1 if setup.packed and (some or not windows) else 0)
        """Number of different masks: with a window, and of packed rows without one."""
        self.compared = shape.lora is not None
        self._embed, self._head = (self._gradients(each()) for each in (shape.embed_parameters, shape.head_parameters))
        self._blocks = {shape.sparse[at]: self._gradients(shape.block_parameters(at)) for at, _ in shape.runs}
        """Of a block of each kind: sparse or not."""

    def _gradients(self, parameters: Iterable[Parameter]) -> dict[str, int]:
        """Return the bytes of the gradient of each parameter that is trained, by name."""
        sizes = {each.name: math.prod(each.local(self.tp)) for each in parameters if each.trainable}
        return {name: numel * self.width for name, numel in sizes.items() if numel}

    def inputs(self) -> list[int]:
        """Return the bytes of token ids and targets, and of what blocks read: masks, positions, the tables at them."""
        setup, shape, packed = self.setup, self.shape, self.setup.packed
        masks = [(setup.batch if packed else 1) * setup.seq**2 * self.width] * self.masks
        tables = [2 * self.tokens * shape.head_size * FP32] if packed and shape.rotary else []
        sums = [self.hidden] if self.tp > 1 else []  # an unfinished all-reduce keeps its buffer alive
        return [16 * self.tokens, *masks, *tables, *([8 * self.tokens] if packed else []), *sums]

    def begin(self, tape: Tape, enter: Enter) -> Tensor:
        x = _Unit(self, tape, 0, self._embed).embed()
        if self.masks:  # made of where attention may look, a byte per pair of tokens
            Storage(self.ledger, (1 + self.setup.batch * self.setup.packed) * self.setup.seq**2)
        return x

    def block(self, tape: Tape, x: Tensor, block: int) -> Tensor:
        sparse = self.shape.sparse[block]
        return _Unit(self, tape, block + 1, self._blocks[sparse], sparse).block(x)

    def end(self, tape: Tape, x: Tensor, enter: Enter, mark: Mark) -> Tensor:
        """Run the final norm and the chunked loss, whose two gradients are computed in the forward pass."""
        shape, setup, ledger, tokens, width = self.shape, self.setup, self.ledger, self.tokens, self.width
        unit = 0 if shape.tie else shape.layers + 1
        if unit:
            enter(unit)
        if shape.final_norm:
            mark(x, "end of backward of the head", unit or NO_UNIT)
            x = _Unit(self, tape, unit, self._head).norm(x, "norm")
        vocab = shape.local_vocab(self.tp)
        chunk = min(constants.chunk_tokens(vocab, setup.device), tokens)
        rows = chunk * constants.padded_vocab(vocab)
        kept = [Storage(ledger, tokens * shape.hidden * width, "logits")]
        if shape.trains_head:
            kept.append(Storage(ledger, vocab * shape.hidden * FP32, "logits"))
        small = Storage(ledger, 5 * tokens, "logits")  # losses, and which targets count
        buffer = Storage(ledger, rows * width, "logits")
        if not self.has_kernels or vocab != shape.vocab:
            # Indices and masks of a chunk, its maxima and sums, and in half precision its logits in fp32.
            few = (29 if self.tp == 1 else 54) * chunk
            Storage(ledger, few + (rows * FP32 if width < FP32 else 0), "logits")
        if width < FP32 and setup.device == "cpu" and shape.trains_head:
            Storage(ledger, chunk * (vocab + shape.hidden) * FP32, "logits")
        del buffer, small

        def backward(incoming: list[Storage]) -> list[Storage]:
            incoming.clear()
            if len(kept) > 1:
                weight = kept.pop()
                if width < FP32:
                    weight = Storage(ledger, weight.nbytes // FP32 * width, "buffers")
                tape.hand_over(TIED if shape.tie else unit, weight)
            return [kept.pop()]

        node = tape.record([x])
        node.backward = backward
        return Tensor(Storage(ledger, 4), node)


class _Unit:
    """The operations of one unit, on a tape."""

    def __init__(self, of: Decoder, t: Tape, unit: int, gradients: dict[str, int], sparse: bool = False) -> None:
        self.of, self.t, self.unit, self.gradients, self.sparse = of, t, unit, gradients, sparse
        self.shape, self.tp, self.tokens, self.width, self.cuda = of.shape, of.tp, of.tokens, of.width, of.cuda

    def params(self, *names: str) -> list[int]:
        """Return the bytes of the gradients of those parameters that are there and trained."""
        return [self.gradients[name] for name in names if name in self.gradients]

    def norm(self, x: Tensor, name: str) -> Tensor:
        return self.norm_rows(x, self.tokens, self.shape.hidden, self.params(name, f"{name}_bias"))

    def norm_rows(self, x: Tensor, rows: int, width: int, params: list[int]) -> Tensor:
        t, nbytes, fp32 = self.t, rows * width * self.width, rows * width * FP32
        if self.shape.norm == "rms" and not self.cuda:
            half = self.width < FP32
            source = t.new(fp32) if half else x.storage
            rstd, normal = t.new(rows * FP32), t.new(fp32)
            saved = [source, rstd, normal] if params else [source, rstd]
            # In half precision backward has four arrays beside the source: of a trained norm one is the saved one.
            temporary = (4 if half and not params else 3) * fp32
            return t.op([x], nbytes, saved, [nbytes], fp32, temporary, params, self.unit)
        stats = rows * (FP32 if self.cuda else self.width) * (1 if self.shape.norm == "rms" else 2)
        return t.op([x], nbytes, [x.storage, t.new(stats)], [nbytes], params=params, unit=self.unit)

    def dropout(self, x: Tensor) -> Tensor:
        """Apply dropout: a GPU's one kernel makes a mask of bytes too, a CPU draws the scale factors before."""
        return self.dropped(x, self.tokens * self.shape.hidden) if self.shape.dropout else x

    def dropped(self, x: Tensor, numel: int) -> Tensor:
        mask, nbytes = self.t.new(numel * (1 if self.cuda else self.width)), numel * self.width
        return self.t.op([x], nbytes, [mask], [nbytes], late=self.cuda)

    def embed(self) -> Tensor:
        """Look up the tokens; the table's gradient is dense."""
        shape, t, hidden = self.shape, self.t, self.of.hidden
        indices = t.new(8 * self.tokens)
        root, places = Tensor(indices), None
        if shape.positions:  # a slice of the table, whose gradient is of the whole
            places = t.op([], 0, params=self.params("positions"), unit=0)
        table = self.params("tokens", "project_in")
        last = self._grouping(shape.local_vocab(self.tp), shape.embed_dim or shape.hidden)
        x = t.op([root], hidden, [indices], [SHARED], params=table, unit=0, last=last)
        if shape.local_vocab(self.tp) != shape.vocab:
            # Tokens of other ranks give zeros; the sum over ranks is in place.
            mask = t.new(self.tokens)
            x = t.op([x], hidden, [mask], [hidden])
        if places is not None:
            sums = self.of.setup.seq * shape.hidden * self.width
            x = t.op([x, places], hidden, (), [SHARED, sums])
        if shape.embed_norm:
            x = self.norm(x, "embed_norm")
        return self.dropout(x)

    def _grouping(self, vocab: int, hidden: int) -> int:
        """Return what a GPU allocates to sum the gradients of equal tokens: ids are sorted, twice and with their order.

        Of more than `UNSORTED` tokens it sums groups of ten first, in fp32.
        """
        tokens = self.tokens
        if not self.cuda:
            return 0
        groups = tokens // 10 + min(tokens, vocab) if tokens > UNSORTED else 0
        return 4 * 8 * tokens + groups * hidden * FP32

    # -- blocks ----------------------------------------------------------------------------------------------------

    def block(self, x: Tensor) -> Tensor:
        """Run the block; the norms of every arrangement but `pre` are an estimate: no built-in model has it."""
        norms = self.shape.norms
        if norms == "shared":
            y = self.norm(x, "norm1")
            return self.add(self.add(x, self.attention(y)), self.mlp(y))
        if norms == "parallel":
            return self.add(self.add(x, self.attention(self.norm(x, "norm1"))), self.mlp(self.norm(x, "norm2")))
        if norms == "post":
            x = self.add(x, self.norm(self.attention(x), "norm1"))
            return self.add(x, self.norm(self.mlp(x), "norm2"))
        if norms == "sandwich":
            x = self.add(x, self.norm(self.attention(self.norm(x, "norm1")), "norm2"))
            return self.add(x, self.norm(self.mlp(self.norm(x, "norm3")), "norm4"))
        x = self.add(x, self.attention(self.norm(x, "norm1")))
        return self.add(x, self.mlp(self.norm(x, "norm2")))

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return self.t.op([x, y], self.of.hidden, grads=[SHARED, SHARED])

    # -- projections -----------------------------------------------------------------------------------------------

    def linear(self, name: str, x: Tensor, inputs: int, outputs: int) -> Tensor:
        """Run a projection of all tokens, with its bias if there is one."""
        tokens, width = self.tokens, self.width
        grad, nbytes = tokens * inputs * width, tokens * outputs * width
        return self._project(x, tokens, grad, nbytes, self.params(name), self.params(f"{name}_bias"))

    def _project(self, x: Tensor, rows: int, grad: int, nbytes: int, weight: Sizes, bias: Sizes = ()) -> Tensor:
        """Multiply rows with a matrix: `nbytes` of output, `grad` bytes of the input's gradient.

        `weight` and `bias` are what their gradients take, if they have any.
        """
        params, last = [*weight, *bias], self._summing(rows, bias)
        # The input is saved unless the weight is frozen; the output layer is in the loss.
        saved = [x.storage] if self.shape.lora is None else []
        return self.t.op([x], nbytes, saved, [grad], params=params, unit=self.unit, product=True, last=last)

    def _summing(self, rows: int, bias: Sizes) -> int:
        """Return what a GPU allocates to sum the rows of an output's gradient into that of its bias."""
        columns = sum(bias) // self.width
        return column_sums_nbytes(rows, columns) if self.cuda and columns else 0

    def adapt(self, y: Tensor, x: Tensor, *names: str) -> Tensor:
        """Add the adapters of these projections, which are one matrix with output `y`."""
        lora, t, unit = self.shape.lora, self.t, self.unit
        names = self.shape.matrices(*names)
        if lora is None or not (chosen := lora.of(names)):
            return y
        tokens, width = self.tokens, self.width
        inputs, rank = self.shape.projections()[names[0]][0], lora.rank * len(chosen)
        outputs = sum(self.shape.projections()[name][1] for name in names)
        a, b = (self.params(*(f"{name}.{end}" for name in chosen)) for end in "ab")
        grad, thin = tokens * inputs * width, tokens * lora.rank * width
        if lora.dropout:
            lows = []
            for each in a:
                given = self.dropped(x, tokens * inputs)
                saved, params = [given.storage], [each]
                lows.append(t.op([given], thin, saved, [grad], params=params, unit=unit, product=True))
                del saved
                del given
            shared = [SHARED] * len(lows)
            low = lows.pop() if len(lows) == 1 else t.op(lows, tokens * rank * width, grads=shared)
            lows.clear()
        else:
            joined = [t.new(sum(a))] if len(chosen) > 1 and x.node is not None else []
            saved = [x.storage, *joined]
            low = t.op([x], tokens * rank * width, saved, [grad], params=a, unit=unit, product=True)
            del saved, joined
        wide = [t.new(outputs * rank * width)] if len(names) > 1 else []
        grads, spare = [SHARED, tokens * rank * width], outputs * rank * width if wide else 0
        saved = [low.storage, *wide]
        return t.op([y, low], y.storage.nbytes, saved, grads, 0, spare, params=b, unit=unit, product=True)

    def _sum_out(self, y: Tensor, bias: list[int]) -> Tensor:
        """Sum an output over tensor-parallel ranks in place; its bias is added afterwards, out of place."""
        if self.tp == 1 or not bias:
            return y
        last = self._summing(self.tokens, bias)
        return self.t.op([y], self.of.hidden, grads=[SHARED], params=bias, unit=self.unit, last=last)

    # -- attention -------------------------------------------------------------------------------------------------

    def attention(self, x: Tensor) -> Tensor:
        shape, tp = self.shape, self.tp
        if shape.latent:
            q, k, v = self._latent(x, shape.latent)
        else:
            y = self.linear("qkv", x, shape.hidden, (shape.width_q + 2 * shape.width_kv) // tp)
            y = self.adapt(y, x, "q", "k", "v")
            parts = self.t.split(y, self.of.queries + 2 * self.of.keys)
            del y
            q = k = v = parts
            if shape.q_norm == shape.head_size:
                q = self._rotate_normed(parts, shape.heads, "q_norm")
                k = self._rotate_normed(parts, shape.kv_heads or shape.heads, "k_norm")
            elif shape.rotary or shape.q_norm:
                q = k = self._rotate(parts)
        out = self._attend(q, k, v)
        weight, bias = self.params("out", "sinks"), self.params("out_bias")
        grad = self.tokens * (shape.width_out // tp) * self.width
        y = self._project(out, self.tokens, grad, self.of.hidden, weight, bias if tp == 1 else ())
        y = self.adapt(y, out, "out")
        return self.dropout(self._sum_out(y, bias))

    def _latent(self, x: Tensor, latent: Latent) -> tuple[Tensor, Tensor, Tensor]:
        """Make queries, keys and values of latent attention. This is an estimate: no built-in model has it.

        Values are padded to the size of keys, as flash kernels do.
        """
        shape, tp, t, keys = self.shape, self.tp, self.t, self.of.keys

        def low(name: str, rank: int, rest: int = 0) -> Tensor:
            y = self.linear(name, x, shape.hidden, rank + rest)
            nbytes, norm = self.tokens * rank * self.width, self.params(f"{name}_norm")
            return t.op([y], nbytes, [y.storage], [y.storage.nbytes], params=norm, unit=self.unit)

        source = low("q_a", latent.q_rank) if latent.q_rank else x
        q = self.linear("q_b", source, latent.q_rank or shape.hidden, shape.width_q // tp)
        wide = shape.heads * (latent.nope + latent.value) // tp
        kv = self.linear("kv_b", low("kv_a", latent.kv_rank, latent.rope), latent.kv_rank, wide)
        parts = t.split(kv, kv.storage.nbytes)
        q, k = t.op([q], self.of.queries), t.op([parts], keys, grads=[parts.storage.nbytes])
        return q, k, t.op([parts], keys, grads=[parts.storage.nbytes])

    def _rotate(self, parts: Tensor) -> Tensor:
        """Rotate (and norm) queries and keys: in fp32, rounded once; only the result is kept."""
        both = self.of.queries + self.of.keys
        wide = both * FP32 // self.width
        half = self.width < FP32
        if self.shape.q_norm:  # an estimate: no built-in model has norms over all heads
            params = self.params("q_norm", "k_norm")
            temporary, backward_temporary = both + wide * (2 if half else 1), 2 * wide
            saved = [self.t.new(wide)]
        else:
            # The rolled copy, and the product in fp32 where that is not the result itself.
            temporary = backward_temporary = 0 if self.of.has_kernels else both + (wide if half else 0)
            params, saved = [], []
        # On a GPU the roll's copy of its input comes first, and is freed before the product.
        first, sizes = self.cuda, (temporary, backward_temporary)
        rotated = self.t.op([parts], both, saved, [both], *sizes, params, self.unit, output_first=first)
        return self.t.split(rotated, both)

    def _rotate_normed(self, parts: Tensor, heads: int, name: str) -> Tensor:
        """Norm each head of queries or of keys, and rotate the result."""
        rows, size = self.tokens * heads // self.tp, self.shape.head_size
        nbytes, wide = rows * size * self.width, rows * size * FP32
        normed = self.norm_rows(parts, rows, size, self.params(name))
        if not self.shape.rotary:
            return normed
        temporary = 0 if self.of.has_kernels else nbytes + (wide if self.width < FP32 else 0)
        return self.t.op([normed], nbytes, (), [nbytes], temporary, temporary)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        setup, heads, t, queries = self.of.setup, self.shape.heads // self.tp, self.t, self.of.queries
        masks, groups = self.of.masks, self.shape.heads // (self.shape.kv_heads or self.shape.heads)
        shared = self.cuda and self.width < FP32 and not masks  # kernels that read shared heads in place
        if groups > 1 and not shared:
            k, v = (t.op([each], queries, grads=[self.of.keys]) for each in (k, v))
        if self.shape.dropout and not self.cuda:
            return self._attend_whole(q, k, v)
        keys = self.of.keys if k.storage is q.storage or k.storage is v.storage else k.storage.nbytes
        one = self.tokens * heads * FP32
        if self.cuda and (self.width == FP32 or masks):
            one = setup.batch * heads * -(-setup.seq // 32) * 32 * FP32
        extra = 0
        if self.cuda:
            # The sum of dq in fp32, one number per row, and keys' gradients per query head before they are summed.
            extra = self.tokens * (self.shape.width_q // self.tp) * FP32 + one
            extra += 2 * queries if groups > 1 and shared else 0
        new = t.new if self.shape.dropout else t.product  # what draws random numbers is recomputed
        out, stats = new(queries), new(one)
        saved = [q.storage, k.storage, v.storage, out, stats]
        if q.node is None and k.node is None and v.node is None:  # before the first adapter
            return Tensor(out)
        return Tensor(out, t.record([q, k, v], saved, [queries, keys, keys], backward_temporary=extra))

    def _attend_whole(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend with all scores materialised in fp32: the plain kernel, operation by operation."""
        t, queries, keys = self.t, self.of.queries, self.of.keys
        scores = self.of.setup.batch * (self.shape.heads // self.tp) * self.of.setup.seq**2 * FP32
        wide = queries * FP32 // self.width
        q, k = t.op([q], wide, grads=[queries]), t.op([k], wide, grads=[keys])
        mask = t.new(self.of.setup.seq**2 * FP32)  # until the kernel returns
        products = t.op([q, k], scores, [q.storage, k.storage], [wide, wide])
        del q, k
        weights = t.new(scores)
        soft = Tensor(weights, t.record([products], [weights], [scores]))
        del products, weights
        dropped = t.op([soft], scores, [t.new(scores)], [scores])
        del soft
        # Values of one sequence are read in place; those of several are copied, as are narrower ones.
        in_place = self.of.setup.batch == 1 and self.width == FP32
        saved = [dropped.storage, v.storage if in_place else t.new(wide)]
        out = t.op([dropped, v], queries, saved, [scores, keys])
        del mask
        return out

    # -- mlp -------------------------------------------------------------------------------------------------------

    def mlp(self, x: Tensor) -> Tensor:
        if self.sparse:
            return self._experts(x)
        bias = self.params("down_bias")
        biases = self.params("up_bias"), bias if self.tp == 1 else ()
        y = self._feed(x, self.tokens, self.shape.mlp_hidden, self.params("up"), self.params("down"), biases)
        return self.dropout(self._sum_out(y, bias))

    def _feed(
        self, x: Tensor, tokens: int, mlp_hidden: int, up: Sizes, down: Sizes, biases: tuple[Sizes, Sizes] = ((), ())
    ) -> Tensor:
        """Run `tokens` rows through one MLP; that of experts, which no built-in model has, gates in two operations."""
        shape, width, t = self.shape, self.width, self.t
        inner = mlp_hidden // self.tp
        nbytes, hidden = tokens * inner * width, tokens * shape.hidden * width
        double = 2 if shape.gated else 1
        first = self._project(x, tokens, hidden, double * nbytes, up, biases[0])
        first = self.adapt(first, x, *(("gate", "up") if shape.gated else ("up",)))
        if shape.gated and shape.experts:
            parts = t.split(first, 2 * nbytes)
            gate = t.op([parts], nbytes, [first.storage], [nbytes])
            act = t.op([gate, parts], nbytes, [gate.storage, first.storage], [nbytes, nbytes])
            del gate
        else:
            act = t.op([first], nbytes, [first.storage], [double * nbytes])
            del first
        y = self._project(act, tokens, nbytes, hidden, down, biases[1])
        return self.adapt(y, act, "down")

    def _experts(self, x: Tensor) -> Tensor:
        """Route tokens evenly to experts. This is an estimate: no built-in model is sparse."""
        shape, t, hidden = self.shape, self.t, self.of.hidden
        scores = self.tokens * shape.experts * FP32
        visits = self.tokens * shape.experts_per_token
        rows = visits * shape.hidden * self.width
        router = t.op([x], 2 * scores, [x.storage], [hidden], unit=self.unit)
        sent = t.op([x, router], rows, [router.storage], [hidden, scores])
        names = [name for name in self.gradients if name.startswith("expert")]
        up, down = (self.params(*(name for name in names if end in name)) for end in (".up", ".down"))
        out = self._feed(sent, visits, shape.expert_hidden, up, down)
        y = t.op([out], hidden, [out.storage], [rows])
        if shape.shared_hidden:
            up, down = self.params("shared.up", "shared_gate"), self.params("shared.down")
            y = self.add(y, self._feed(x, self.tokens, shape.shared_hidden, up, down))
        return y
