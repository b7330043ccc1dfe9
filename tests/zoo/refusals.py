# ruff: noqa: E501
"""What is refused, for the table in docs/python.md: each row with the cases of the zoo that show it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from zoo.case import Case


class Refusal(NamedTuple):
    """A row: what is refused, what to do instead, and a pattern of the names of cases that are refused so."""

    what: str
    instead: str
    cases: str
    """Empty: the fuzzer or a test of the engine has it."""


# fmt: off
REFUSALS = (
    Refusal('`loss.backward()`', '`engine.backward(loss)`', ''),
    Refusal('reading or changing a released parameter', '`engine.gathered(...)`', 'guard-released-weights-read-by.*|re-initialise-a-layer|clamp-.*|edit-on-one-rank.*|l2-over-parameters|print-a-parameter.*|to-list-of.*|guard-parameter-subclass-read.*|guard-data-.*|later-parameters-from-a-vector|states-saved-by-torch|states-of-dcp|guard-parameter-made-from.*'),
    Refusal('`copy.deepcopy(model)` at stage 3, `copy.copy(module)`, `AveragedModel(model)`, `copy.deepcopy(engine)`', '`engine.unsharded_model()`, `zerocli.EMA(engine)`', 'guard-engine-copied|deepcopy-.*|copy-of-a-block|averaged-model|dpo-reference-by-deepcopy|ema-by-hand'),
    Refusal('`p.grad`, `model.zero_grad()`, `clip_grad_norm_` between backward and step', '`engine.grad`, `engine.zero_grad`, `clip=`', 'clip-grad-norm-of-torch|edit-grad-by-hand|assign-grad-by-hand|zero-grad-of-the-model|guard-parameter-subclass-clipped.*|optim-hook-on-gradients'),
    Refusal('backward of a loss that is older than the last step', 'run forward again', 'backward-of-an-old-graph|stale-(?!deferred).*'),
    Refusal('a parameter changed in place to other values on some ranks than on others, stages 0 to 2', 'the same change on every rank; `engine.gathered(..., write=True)` keeps rank 0\'s', 'edit-that-differs-.*'),
    Refusal('replacing a parameter object', 'copy into it, or shard anew', 'replace-a-parameter|guard-swapped-tensors'),
    Refusal('a parameter changed in place inside forward, stage 3', '`engine.gathered(..., write=True)` between steps', 'clamp-parameters-.*'),
    Refusal('a part of a unit called without the unit, stage 3', 'call the unit, or choose `units=`', ''),
    Refusal('a module inside and outside of a reentrant checkpoint', '`use_reentrant=False`', ''),
    Refusal('complex parameters, float64', 'a real tensor of shape (..., 2) and `torch.view_as_complex`; `model.float()`', ''),
    Refusal('trainable float8 parameters; lazy, sparse or DTensor ones', 'freeze them or train in another dtype; run the model once; make them dense', 'guard-lazy-parameters|odd-lazy|odd-fully-sharded'),
    Refusal('a model in DDP, FSDP or DataParallel, or one without parameters', 'pass the plain module', 'odd-data-parallel-wrapper|odd-without-parameters|odd-parameters-hidden|odd-fully-sharded'),
    Refusal('`torch.compile(fullgraph=True)` around sharded blocks', 'leave `fullgraph` out; `compile=True`', 'odd-compiled-as-one-graph|odd-compiled-in-place-as-one-graph'),
    Refusal('a TorchScript module as a unit, or given released weights; `torch.jit.trace`, stage 3', 'the plain module; `units=` around it; `engine.gathered`; trace `engine.unsharded_model()`', 'odd-scripted-blocks|guard-scripted-.*|later-traced'),
    Refusal('two parameters on one memory (`b.data = a.data`)', 'share the parameter: `b = a`', 'alias-tied-by-data'),
    Refusal('a numpy array, a DLPack export or the storage of a parameter that is kept over `shard`', 'a copy', 'alias-numpy|alias-dlpack|alias-storage'),
    Refusal("a tensor on a parameter's memory, touched after `shard` at stage 3 or under another dtype", 'compute it in forward, or keep a `.clone()`', 'alias-(?!numpy|dlpack|storage|tied|buffer|kept|cached).*'),
    Refusal('a buffer that shares memory with a parameter, stage 3', 'register a copy', 'alias-buffer'),
    Refusal('a view of a gathered weight used after `step()`, loading or `gathered(write=True)`, stage 3', 'compute it in forward, or keep a `.clone()`', 'alias-kept-from-gathered.*|alias-(data-)?cached-in-.*'),
    Refusal('`torch.func.grad`, `vjp`, `jacrev` on partitioned parameters', 'inside `with torch.no_grad(), engine.gathered():`', 'guard-func-.*'),
    Refusal('`disable_saved_tensors_hooks` in a recomputed block, and at stage 3', 'leave the block out by `recompute=`; `stage=2`', '.*hooks-disabled.*'),
    Refusal('prune, parametrize, weight_norm, a new or replaced module, blocks in another order after `shard`', 'change the model before', 'guard-(prune|parametrize|weight-norm)-after-shard|guard-module-added.*|guard-child-replaced.*|guard-blocks-changed-places.*'),
    Refusal('`model.half()`, `.to(...)` that change something after `shard`', '`precision=`, `device=`, `engine.unsharded_model`', 'guard-conversion-to-(another-dtype|meta.*)'),
    Refusal('a model with bf16 (or fp16) parameters under the default precision', '`precision="bf16"`, or `model.float()`', 'own-object-(bf16|mixed)-model-in-fp32'),
    Refusal('fp32 data in an operation with bf16 parameters outside of a layer', '`x.to(...)`, or `cast_inputs=True`', 'own-object-data-that-cannot-be-cast'),
    Refusal('a recomputed block whose buffer, tensor or list begins to change after its first calls, whose input is changed in place, that draws from an iterator, takes another path or computes other values, even if the model catches what fails', 'leave it out by `recompute=`', 'recompute-state-(iterator|python-generator|cycle|list-that-grows-late|swapped.*|written-to-a-file)|recompute-(buffer|attribute)-that-changes-late|recompute-caught-refusal.*|recompute-another-path|recompute-input-changed-in-place'),
    Refusal('an optimizer that draws random numbers, or whose `step` needs a closure', 'draw them in the loss; one that steps from gradients', 'optim-draws-random-numbers|optim-python-random|optim-lbfgs'),
    Refusal('an optimizer with `step` replaced on the instance, groups changed after `shard`, `state_dict` hooks', 'a subclass; all groups to `shard`; `engine.optimizer_state_dict()`', 'optim-step-replaced.*|optim-parameter-in-two-groups|optim-two-optimizers|optim-weights-swapped.*'),
    Refusal('an option, attribute or global that makes an elementwise optimizer another rule, or gives it momentum, after `shard`', 'set it before `shard`', 'later-.*-makes-a-rule-another|later-momentum'),
    Refusal('a `FlatOptimizer` that is not elementwise', 'a `torch.optim.Optimizer`', ''),
    Refusal('ranks that make different calls, shard different models or have different learning rates', 'the same calls in the same order on every rank', 'calls-.*|buffer-.*(rank|ranks|rank-only)|engines-backward-of-different-ones'),
    Refusal('an optimizer that reads or changes frozen parameters, or a class that makes its states from values', 'leave frozen ones out of its groups; an instance', 'optim-(reads-frozen-weights|decays-frozen-parameters|class-with-values.*)'),
    Refusal('reading a parameter before a deferred update is done', '`engine.synchronize()`', 'stale-deferred-update'),
    Refusal('one module in two engines', 'one nn.Module that holds both models, or close the first engine', 'guard-encoder-in-two-engines'),
)
# fmt: on


def table() -> str:
    """Return the rows as they stand in docs/python.md."""
    return "".join(f"| {row.what} | {row.instead} |\n" for row in REFUSALS)


def unlisted(cases: Iterable[Case]) -> Iterator[str]:
    """Yield the cases that are refused at some stage and are in no row, and rows whose pattern fits no such case."""
    names = [c.name for c in cases if any(e.refused and not e.exact for e in (c.below3, c.at3))]
    patterns = [row.cases for row in REFUSALS if row.cases]
    yield from (name for name in names if not any(re.fullmatch(pattern, name) for pattern in patterns))
    yield from (pattern for pattern in patterns if not any(re.fullmatch(pattern, name) for name in names))
