"""A Hugging Face config.json of a built-in family, translated to our model keys. (No torch.)

Every key of the file is one of four:

- used: it becomes a key of ours (`_COMMON`, `_TYPES`, and below: positions, heads, biases, windows, rotary positions);
- without effect on training (`_NO_EFFECT`): token ids, what generation does, how weights are stored, labels;
- fixed (`_FIXED`): the built-in code computes one value of it, and any other is refused;
- unknown: transformers' code for these families does not read it. It is named in the log unless it says nothing (null,
  false, 0 or empty), and not used.

Random weights do not follow `initializer_range`: they start as those of every zerocli model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zerocli.config.hub import by_own_names
from zerocli.config.rope import broken_rope, read_rope
from zerocli.errors import Problem, quote
from zerocli.layout.ranges import format_ranges

# Hugging Face key, our key, and the default in Hugging Face's config class: files omit defaults.
_GPT2: tuple[tuple[str, str, object], ...] = (
    ("vocab_size", "vocab", 50257),
    ("n_layer", "layers", 12),
    ("n_embd", "hidden", 768),
    ("n_head", "heads", 12),
    ("n_inner", "mlp_hidden", 0),
    ("layer_norm_epsilon", "norm_eps", 1e-5),
    ("tie_word_embeddings", "tie", True),
    ("n_positions", "positions", 1024),
)


def _llama(kv_heads: int, mlp: int, vocab: int, positions: int) -> tuple[tuple[str, str, object], ...]:
    return (
        ("vocab_size", "vocab", vocab),
        ("num_hidden_layers", "layers", 32),
        ("hidden_size", "hidden", 4096),
        ("num_attention_heads", "heads", 32),
        ("num_key_value_heads", "kv_heads", kv_heads),
        ("intermediate_size", "mlp_hidden", mlp),
        ("rms_norm_eps", "norm_eps", 1e-6),
        ("tie_word_embeddings", "tie", False),
        ("max_position_embeddings", "positions", positions),
    )


_USED = {
    "gpt2": _GPT2,
    "llama": _llama(0, 11008, 32000, 2048),
    "mistral": _llama(8, 14336, 32000, 131072),
    "qwen2": _llama(32, 22016, 151936, 32768),
    "qwen3": _llama(32, 22016, 151936, 32768),
}
TYPES = tuple(_USED)
"""The model types that are built in."""
_WINDOWED = {"mistral": ("sliding_window",)} | dict.fromkeys(
    ("qwen2", "qwen3"), ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
)
_DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
_ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings")
_BIASES = {"llama": ("attention_bias", "mlp_bias"), "qwen3": ("attention_bias",)}

# What the built-in code computes; null is the default, which is the first.
_FIXED: dict[str, tuple[object, ...]] = {
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({},),
}
_FIXED_GPT2: dict[str, tuple[object, ...]] = _FIXED | {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
}
_FIXED_LLAMA: dict[str, tuple[object, ...]] = _FIXED | {
    "hidden_act": ("silu", "swish"),
    "attention_dropout": (0,),
    "partial_rotary_factor": (1,),
}

_NO_EFFECT = frozenset(
    """
    model_type architectures _name_or_path name_or_path transformers_version torch_dtype dtype use_cache
    quantization_config
    initializer_range auto_map gradient_checkpointing pretraining_tp torchscript use_bfloat16 tf_legacy_loss
    attn_implementation _attn_implementation _attn_implementation_autoset chunk_size_feed_forward
    bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id tokenizer_class prefix
    is_decoder cross_attention_hidden_size output_attentions output_hidden_states output_scores return_dict
    return_dict_in_generate task_specific_params problem_type finetuning_task num_labels id2label label2id
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences forced_bos_token_id forced_eos_token_id remove_invalid_values begin_suppress_tokens
    suppress_tokens exponential_decay_length_penalty n_ctx summary_type summary_use_proj summary_activation
    summary_proj_to_labels summary_first_dropout
    """.split()
)
_HEADS = ("ForCausalLM", "LMHeadModel", "Model")
"""How the names of architectures end that are causal language models, or the stack below one."""


@dataclass
class Translation:
    """A config.json as our keys, with the place of each; positions is 0 if the file's are not a number."""

    model: dict[str, Any]
    places: dict[str, str]
    positions: int = 0
    problems: list[Problem] = field(default_factory=list)
    """What is wrong whatever code runs the model."""
    unsupported: list[Problem] = field(default_factory=list)
    """What the built-in code does not compute; transformers' code may."""
    unknown: list[str] = field(default_factory=list)
    """Keys that no code of these families reads and that say something."""


def translate(values: Mapping[str, Any], places: Mapping[str, str], path: str) -> Translation:
    """Return the keys of a config.json whose `model_type` is one of `TYPES`; raise nothing."""
    return _Translator(*by_own_names(values, places), path).run()


class _Translator:
    def __init__(self, values: Mapping[str, Any], places: Mapping[str, str], path: str) -> None:
        self.values, self.places, self.path = values, places, path
        self.type: str = values["model_type"]
        self.family = "gpt2" if self.type == "gpt2" else "llama"
        self.made = Translation({"family": self.family}, {"model.family": self.place("model_type")})

    def place(self, key: str) -> str:
        return self.places.get(key, self.path)

    def set(self, ours: str, value: object, theirs: str) -> None:
        self.made.model[ours] = value
        self.made.places[f"model.{ours}"] = self.place(theirs)

    def refuse(self, key: str, fact: str) -> None:
        self.made.unsupported.append(Problem(self.place(key), f"{key} {fact}"))

    def run(self) -> Translation:
        values, made = self.values, self.made
        for theirs, ours, default in _USED[self.type]:
            given = values.get(theirs)
            if theirs == "num_key_value_heads" and theirs in values and given is None:
                given = 0  # null: as many as heads
            self.set(ours, default if given is None else given, theirs)
        if self.type != self.family:
            self.set("type", self.type, "model_type")
        positions, key = made.model["positions"], _USED[self.type][-1][0]
        if isinstance(positions, int) and not isinstance(positions, bool) and positions > 0:
            made.positions = positions
        else:
            del made.model["positions"]
            made.problems.append(Problem(self.place(key), f"{key} {quote(positions)} is not a whole number"))
        self._gpt2() if self.family == "gpt2" else self._llama()
        self._fixed(_FIXED_GPT2 if self.family == "gpt2" else _FIXED_LLAMA)
        self._architectures()
        self._unknown()
        return made

    def _gpt2(self) -> None:
        rates = {key: 0.1 if self.values.get(key) is None else self.values[key] for key in _DROPOUTS}
        first = rates["resid_pdrop"]
        self.set("dropout", first, "resid_pdrop")
        for key, rate in rates.items():
            if rate != first:
                self.refuse(key, f"{quote(rate)} is not resid_pdrop {quote(first)}: the built-in gpt2 has one dropout")

    def _llama(self) -> None:
        values, model = self.values, self.made.model
        self.set("bias", False, "model_type")
        head_dim = values.get("head_dim")
        if head_dim is None:
            head_dim = 128 if self.type == "qwen3" else 0
        hidden, heads = model["hidden"], model["heads"]
        if all(isinstance(number, int) for number in (head_dim, hidden, heads)) and head_dim * heads == hidden:
            head_dim = 0
        self.set("head_dim", head_dim, "head_dim")
        # Missing means false. A text or a number is reported when the key is checked.
        attention = values.get("attention_bias") if "attention_bias" in _BIASES.get(self.type, ()) else False
        attention = False if attention is None else attention
        self.set("qkv_bias", True if self.type == "qwen2" else attention, "attention_bias")
        self.set("out_bias", attention, "attention_bias")
        mlp = values.get("mlp_bias") if self.type == "llama" else False
        self.set("mlp_bias", False if mlp is None else mlp, "mlp_bias")
        self.set("qk_norm", self.type == "qwen3", "model_type")
        self._window()
        self._rope()

    def _rope(self) -> None:
        scaling, theta = read_rope(self.values, self.made.positions)
        name = "rope_scaling" if self.values.get("rope_scaling") else "rope_parameters"
        inner = f"{name}.rope_theta"
        self.set("rope_theta", 10000.0 if theta is None else theta, inner if inner in self.places else "rope_theta")
        if fact := broken_rope(scaling):
            self.refuse(name, fact)
        elif scaling:
            self.set("rope_scaling", scaling, name)

    def _window(self) -> None:
        """Set the window and the layers that have it, as transformers' config classes do."""
        values, layers = self.values, self.made.model["layers"]
        keys = _WINDOWED.get(self.type, ())
        types = values.get("layer_types")
        if types is not None and "layer_types" not in keys:
            wanted = "sliding_attention" if self.type == "mistral" and values.get("sliding_window", 1) else ""
            if not isinstance(types, list) or any(kind != (wanted or "full_attention") for kind in types):
                self.refuse("layer_types", f"{quote(types)} is not what transformers' {self.type} computes")
        window = values.get("sliding_window", 4096)
        if not keys or window is None or ("use_sliding_window" in keys and not values.get("use_sliding_window")):
            if "layer_types" in keys and isinstance(types, list) and any(kind != "full_attention" for kind in types):
                self.refuse("layer_types", "names sliding_attention, but use_sliding_window is false")
            return
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            fact = f"sliding_window {quote(window)} is not a whole number above 0"
            self.made.problems.append(Problem(self.place("sliding_window"), fact))
            return
        if not isinstance(layers, int) or isinstance(layers, bool) or not 0 < layers <= 10_000:
            return  # reported where the key is checked
        if self.type == "mistral":
            chosen = list(range(layers))
        elif types is None:
            first = values.get("max_window_layers", 28)
            if isinstance(first, bool) or not isinstance(first, int):
                fact = f"max_window_layers {quote(first)} is not a whole number"
                self.made.problems.append(Problem(self.place("max_window_layers"), fact))
                return
            chosen = list(range(max(0, first), layers))
        elif isinstance(types, list) and len(types) == layers and {*map(str, types)} <= _KINDS:
            chosen = [at for at, kind in enumerate(types) if kind == "sliding_attention"]
        else:
            self.refuse("layer_types", f"is not {layers} of {' and '.join(sorted(_KINDS))}")
            return
        if chosen:
            self.set("window", window, "sliding_window")
            if len(chosen) < layers:
                self.set("window_layers", format_ranges(chosen), "layer_types")

    def _fixed(self, table: Mapping[str, tuple[object, ...]]) -> None:
        for key, computed in table.items():
            value = self.values.get(key)
            if value is not None and value not in computed:
                self.refuse(key, f"{quote(value)} is not what the built-in {self.type} computes: {quote(computed[0])}")

    def _architectures(self) -> None:
        names = self.values.get("architectures")
        for name in names if isinstance(names, list) else [names]:
            if name is not None and not str(name).endswith(_HEADS):
                self.refuse("architectures", f"{quote(name)} is not a causal language model")

    def _unknown(self) -> None:
        used = {theirs for theirs, _, _ in _USED[self.type]}
        if self.family == "gpt2":
            used |= {*_DROPOUTS, *_FIXED_GPT2}
        else:
            used |= {"head_dim", "layer_types", *_ROPE, *_FIXED_LLAMA, *_WINDOWED.get(self.type, ())}
            used |= {*_BIASES.get(self.type, ())}
        rest = (key for key, value in self.values.items() if value and key not in used and key not in _NO_EFFECT)
        # What transformers' class of this type has no such key for, and its code therefore does not read.
        self.made.unknown += sorted(map(str, rest))


_KINDS = {"full_attention", "sliding_attention"}
