"""Styles of tensor parallelism for torch's `parallelize_module`, on plain parameters.

A pair of linear layers is split so that nothing is exchanged between them: the first by its outputs (`Column`), the
second by its inputs (`Row`). Its two exchanges are conjugate: where `Column`'s input is the same on all ranks its
gradient is a sum over them, and where `Row`'s output is a sum over the ranks its gradient is the same on all. So a
block of attention and MLP sums batch x seq x hidden elements twice in forward and twice in backward.

The embedding and the head are split by tokens of the vocabulary where the degree divides it, tied or not: each costs
one more such sum, and the loss three numbers per token. Otherwise both are replicated, which needs no exchange but
repeats the head's matmuls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor.parallel import ParallelStyle

from zerocli.engine.tensor_parallel import Cut, TensorParallel
from zerocli.models.loss import Part, linear_cross_entropy
from zerocli.models.parts import Head

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Split(ParallelStyle):
    """A style that slices the parameters that `cuts` names to this rank's parts."""

    def __init__(self, tp: TensorParallel) -> None:
        self.tp = tp

    def cuts(self, module: nn.Module) -> dict[str, Cut]:
        """Return how each parameter that is split is cut, by its name in the full module."""
        return {}

    def extents(self, module: nn.Module) -> dict[str, int]:
        """Return the numbers that the degree must divide, by what they count."""
        return {}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        cuts = self.cuts(module)
        for name, cut in cuts.items():
            whole = module._parameters[name]
            assert whole is not None
            # In place, so that a tied weight stays tied.
            whole.data = cut.part(whole.detach(), self.tp.rank, self.tp.world)
        if cuts and hasattr(module, "reset_parameters"):
            module.reset_parameters = _reset_of_part(module, cuts, self.tp)  # type: ignore[assignment]
        return module


class Column(Split):
    """A linear layer split by its outputs; each of the adjacent `sections` is split separately."""

    def __init__(self, tp: TensorParallel, *sections: int) -> None:
        super().__init__(tp)
        self._sections = sections

    def cuts(self, module: nn.Module) -> dict[str, Cut]:
        assert isinstance(module, nn.Linear)
        sections = self._sections or (module.out_features,)
        named = [(name, p) for name, p in module._parameters.items() if p is not None]
        return {name: Cut(tuple(p.shape), 0, sections) for name, p in named}

    def extents(self, module: nn.Module) -> dict[str, int]:
        assert isinstance(module, nn.Linear)
        return {f"width {i}": length for i, length in enumerate(self._sections or (module.out_features,), 1)}

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        super()._apply(module, device_mesh)
        module.out_features //= self.tp.world
        module.forward = lambda x: _column(x, module.weight, module.bias, self.tp)
        return module


class Row(Split):
    """A linear layer split by its inputs; its bias, which is added once, is replicated."""

    def cuts(self, module: nn.Module) -> dict[str, Cut]:
        assert isinstance(module, nn.Linear)
        return {"weight": Cut(tuple(module.weight.shape), 1, (module.in_features,))}

    def extents(self, module: nn.Module) -> dict[str, int]:
        assert isinstance(module, nn.Linear)
        return {"width": module.in_features}

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        super()._apply(module, device_mesh)
        module.in_features //= self.tp.world

        def forward(x: Tensor) -> Tensor:
            summed = _sum_out(F.linear(x, module.weight), self.tp)
            return summed if module.bias is None else summed + module.bias

        module.forward = forward
        return module


class Heads(Split):
    """An attention split by heads: `heads` and `kv_heads` count this rank's, and each rank draws its own dropout."""

    def extents(self, module: Any) -> dict[str, int]:
        return {"heads": int(module.heads), "kv_heads": int(module.kv_heads)}

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        module.heads //= self.tp.world
        module.kv_heads //= self.tp.world
        module.masks = self.tp.own_masks
        return module


class HeadNorm(Split):
    """A norm of each head, whose weight all heads share: a rank has the gradient of its heads, and ranks sum them."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.RMSNorm)

        def forward(x: Tensor) -> Tensor:
            return F.rms_norm(x, module.normalized_shape, _summed_grad(module.weight, self.tp), module.eps)

        module.forward = forward  # type: ignore[method-assign]
        return module


class VocabularyIn(Split):
    """An embedding of which each rank holds a range of tokens; other tokens give zeros, and ranks sum the results."""

    def cuts(self, module: nn.Module) -> dict[str, Cut]:
        assert isinstance(module, nn.Embedding)
        return {"weight": Cut(tuple(module.weight.shape), 0, (module.num_embeddings,))}

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        super()._apply(module, device_mesh)
        module.num_embeddings //= self.tp.world
        first, stop = self.tp.rank * module.num_embeddings, (self.tp.rank + 1) * module.num_embeddings
        last = self.tp.rank == self.tp.world - 1

        def forward(tokens: Tensor) -> Tensor:
            here = tokens - first
            # A token beyond the vocabulary fails on the last rank, as it does without a split.
            elsewhere = (here < 0) if last else (here < 0) | (tokens >= stop)
            x = F.embedding(here.masked_fill(elsewhere, 0), module.weight)
            return _sum_out(x.masked_fill(elsewhere[..., None], 0), self.tp)

        module.forward = forward
        return module


class VocabularyOut(Split):
    """A head of which each rank holds the rows of a range of tokens; all ranks get the same loss, or all logits."""

    def __init__(self, tp: TensorParallel, vocab: int) -> None:
        super().__init__(tp)
        self._vocab = vocab

    def cuts(self, module: nn.Module) -> dict[str, Cut]:
        assert isinstance(module, Head)
        return {"weight": Cut((self._vocab, module.weight.shape[1]), 0, (self._vocab,))}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, Head)
        if not module.is_tied:  # else the embedding's style slices and initialises it
            super()._apply(module, device_mesh)
        part = Part(self.tp, self.tp.rank * (self._vocab // self.tp.world))

        def forward(x: Tensor, targets: Tensor | None = None) -> Tensor:
            x = module.norm(x)
            if targets is None:
                return _join_out(_column(x, module.weight, None, self.tp), self.tp)
            return linear_cross_entropy(x, module.weight, targets, part=part)

        module.forward = forward  # type: ignore[method-assign]
        return module


def split_decoder(model: Any, embedding: str, mlp: dict[str, Split], tp: TensorParallel) -> dict[str, Split]:
    """Return the plan of a decoder whose embedding has this name, given how the first layer of its MLPs is split.

    Queries, keys and values are sections of one layer's outputs, each made of heads in order: a rank's range of query
    heads is the one that uses its range of key and value heads. Embedding and head are replicated if the degree does
    not divide the vocabulary.
    """
    attention, vocab = model.blocks[0].attention, model.head.weight.shape[0]
    heads, kv_heads, size = attention.heads, attention.kv_heads, attention.head_dim
    plan: dict[str, Split] = {}
    if vocab % tp.world == 0:
        plan = {embedding: VocabularyIn(tp), "head": VocabularyOut(tp, vocab)}
    norms = [name for name in ("q_norm", "k_norm") if getattr(attention, name, None) is not None]
    plan |= {f"blocks.*.attention.{name}": HeadNorm(tp) for name in norms}
    plan |= {
        "blocks.*.attention": Heads(tp),
        "blocks.*.attention.qkv": Column(tp, heads * size, kv_heads * size, kv_heads * size),
        "blocks.*.attention.out": Row(tp),
    }
    return plan | mlp | {"blocks.*.mlp.down": Row(tp)}


def _reset_of_part(module: nn.Module, cuts: dict[str, Cut], tp: TensorParallel) -> Callable[[], None]:
    """Return a `reset_parameters` that fills each part from the full parameter; only one module's are whole at a time.

    So a parameter starts with the same values at every degree.
    """
    reset = module.reset_parameters
    assert callable(reset)

    def reset_part() -> None:
        parts = {name: module._parameters[name] for name in cuts}
        wholes = {name: nn.Parameter(p.new_empty(cuts[name].shape)) for name, p in parts.items() if p is not None}
        module._parameters.update(wholes)
        try:
            reset()
        finally:
            module._parameters.update(parts)
        with torch.no_grad():
            for name, whole in wholes.items():
                module._parameters[name].copy_(cuts[name].part(whole, tp.rank, tp.world))

    return reset_part


class _Column(torch.autograd.Function):
    """A linear layer on a replicated input; the all-reduce of the input's gradient overlaps with the weight's gradient.

    Only the end of this backward needs its result, so the larger matmul hides it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, tp: TensorParallel) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.tp = tp
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        finish = ctx.tp.start_sum_(grad_x) if grad_x is not None else None
        grad_weight = rows.t() @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
        grad_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        if finish is not None:
            finish()
        return grad_x, grad_weight, grad_bias, None


class _SumOut(torch.autograd.Function):
    """The output of a layer split by inputs: an all-reduce whose gradient is the same on all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.mark_dirty(x)
        return tp.sum_(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _SummedGrad(torch.autograd.Function):
    """A parameter that all ranks hold and each uses for its own part: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.tp.sum_(grad.clone()), None


class _JoinOut(torch.autograd.Function):
    """Gathers outputs that are split over ranks in the last dimension; each rank's gradient is that of its part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        everyone = x.new_empty((tp.world, *x.shape))
        tp.all_gather(everyone.view(-1), x.reshape(-1)).wait()
        return torch.cat(everyone.unbind(), -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.tp.world, -1)[ctx.tp.rank], None


# A compiler would count an exchange once, when it is traced, and not each time it runs.
_column: Callable[[Tensor, Tensor, Tensor | None, TensorParallel], Tensor] = torch.compiler.disable(_Column.apply)
_sum_out: Callable[[Tensor, TensorParallel], Tensor] = torch.compiler.disable(_SumOut.apply)
_summed_grad: Callable[[Tensor, TensorParallel], Tensor] = torch.compiler.disable(_SummedGrad.apply)
_join_out: Callable[[Tensor, TensorParallel], Tensor] = torch.compiler.disable(_JoinOut.apply)
