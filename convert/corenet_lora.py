"""CoreNet's LoRA and DoRA tensors -> the tensors and settings of an adapter folder.

CoreNet keeps ``<module>.lora_A.<adapter>.weight`` (r, in) and ``lora_B`` (out, r), for an embedding
``lora_embedding_A.<adapter>`` (r, V) and ``_B`` (D, r), for DoRA ``lora_magnitude_vector`` (out,),
and calls the adapted weight ``<module>.base_layer.weight``. alpha is in no tensor: it comes from
the training YAML or a flag. Source: apple/corenet@1aa3acd ``third_party/modeling/lora.py``.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import mlx.core as mx

from convert.adapter_merge import target_names, to_rank
from convert.names import to_corenet, to_huggingface
from convert.pt_file import PtTensor
from openelm_mlx.adapter_args import AdapterArgs, scale_of
from openelm_mlx.mismatch import Shapes, check_tensors

EMBEDDING = "transformer.token_embeddings"
_TENSOR = re.compile(
    r"(?P<module>.+)\.lora_(?P<part>embedding_A|embedding_B|A|B|magnitude_vector)"
    r"\.(?P<adapter>[^.]+)(\.weight)?"
)
_LEAVES = {
    **{"A": "lora_a", "embedding_A": "lora_a"},
    **{"B": "lora_b", "embedding_B": "lora_b", "magnitude_vector": "m"},
}


@dataclass(frozen=True, kw_only=True)
class AdapterRule:
    """Which modules one entry of CoreNet's ``model.lora.config`` adapts, and how."""

    regex: str = ""  # matched at the start of CoreNet's module name
    alpha: float
    use_rslora: bool = False
    dropout: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Where alpha comes from: flags, then the rules of the YAML."""

    alpha: float | None = None
    use_rslora: bool = False
    rules: tuple[AdapterRule, ...] = ()

    def rule(self, module: str) -> AdapterRule:
        """What holds for a module, under Hugging Face's name.

        Raises:
            ValueError: if nothing says its alpha.
        """
        name = to_corenet(module + ".").removesuffix(".")
        found = next((rule for rule in self.rules if re.match(rule.regex, name)), None)
        if found is None and self.alpha is None:
            raise ValueError(
                f"nothing says the LoRA alpha of {name}, which is in no tensor: give the training "
                "YAML with --config, or --lora-alpha (and --rslora where it was used)"
            )
        found = found or AdapterRule(alpha=self.alpha or 0.0)
        return replace(
            found,
            alpha=found.alpha if self.alpha is None else self.alpha,
            use_rslora=found.use_rslora or self.use_rslora,
        )


def read_rules(lora: object) -> tuple[AdapterRule, ...]:
    """The rules of a YAML's ``model.lora``; none where LoRA is off.

    Raises:
        ValueError: if an entry lacks its regex or alpha, or the regex is none.
    """
    if not isinstance(lora, Mapping) or not lora.get("use_lora"):
        return ()
    return tuple(_read_rule(entry) for entry in lora.get("config") or ())


def _read_rule(entry: Any) -> AdapterRule:
    try:
        values = entry["params"]
        re.compile(entry["regex"])
        return AdapterRule(
            regex=entry["regex"],
            alpha=float(values["lora_alpha"]),
            use_rslora=bool(values.get("use_rslora", False)),
            dropout=float(values.get("lora_dropout", 0.0)),
        )
    except (KeyError, TypeError, ValueError, AttributeError, re.error) as error:
        raise ValueError(
            f"model.lora.config: {entry!r} is no entry with regex, module_type and params "
            f"(lora_alpha, …): {type(error).__name__} {error}"
        ) from error


def is_adapter(name: str) -> bool:
    """Whether CoreNet's name of a tensor is that of an adapter."""
    return ".lora_" in name


def base_name(name: str) -> str:
    """CoreNet's name of a weight without the adapter around it."""
    return name.replace(".base_layer.", ".")


def convert_adapters(
    tensors: Mapping[str, PtTensor],
    base: Shapes,
    *,
    scaling: Scaling,
    rows: int,
    vocab_size: int,
    source: str,
) -> tuple[dict[str, mx.array], AdapterArgs]:
    """Make an adapter folder's tensors and settings; the numbers stay in the file's types.

    One folder has one rank and one scale. Where CoreNet's modules differ, smaller ranks are filled
    with zeros and ``lora_b`` takes the difference in scale, which changes no logit (``to_rank``).

    Args:
        tensors: CoreNet's names -> tensors, adapters only.
        base: Hugging Face's names -> shapes of the model they belong to.
        scaling: alpha and rsLoRA.
        rows: that the embedding's adapter has in the file.
        vocab_size: of them that are kept.
        source: the file, for messages.

    Raises:
        ValueError: if tensors do not fit the model or each other, or no alpha is known.
    """
    named = _rename(tensors, source)
    _check_shapes(named, base, rows, source)
    ranks = {module: leaves["lora_a"].shape[0] for module, leaves in named.items()}
    rules = {module: scaling.rule(module) for module in named}
    scales = {
        module: scale_of(rule.alpha, ranks[module], use_rslora=rule.use_rslora)
        for module, rule in rules.items()
    }
    rank, scale = max(ranks.values()), Counter(scales.values()).most_common(1)[0][0]
    out: dict[str, mx.array] = {}
    for module, leaves in named.items():
        lora_a, lora_b = to_rank(
            *(leaves[leaf].load().T for leaf in ("lora_a", "lora_b")),
            rank=rank,
            factor=scales[module] / scale,
        )
        out[f"{module}.lora_a"] = lora_a[:vocab_size] if module == EMBEDDING else lora_a
        out[f"{module}.lora_b"] = lora_b
        if "m" in leaves:
            out[f"{module}.m"] = leaves["m"].load()
    first = next(iter(rules.values()))
    return out, AdapterArgs(
        rank=rank,
        scale=scale,
        dropout=max(rule.dropout for rule in rules.values()),
        kind=_kind(named, source),
        target_modules=target_names(list(named), [n.removesuffix(".weight") for n in base]),
        use_rslora=first.use_rslora,
    )


def adapter_rows(tensors: Mapping[str, PtTensor]) -> int | None:
    """Vocabulary rows of the embedding's adapter, None where it has none."""
    shapes = [t.shape for name, t in tensors.items() if ".lora_embedding_A." in name]
    return shapes[0][-1] if shapes else None


def _rename(tensors: Mapping[str, PtTensor], source: str) -> dict[str, dict[str, PtTensor]]:
    """Module under Hugging Face's name -> leaf -> tensor, still in CoreNet's layout."""
    named: dict[str, dict[str, PtTensor]] = {}
    adapters = set()
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise ValueError(f"{source}: {name} is no LoRA or DoRA tensor that CoreNet writes")
        adapters.add(match["adapter"])
        module = to_huggingface(match["module"] + ".").removesuffix(".")
        named.setdefault(module, {})[_LEAVES[match["part"]]] = tensor
    if len(adapters) > 1:
        raise ValueError(
            f"{source} holds {len(adapters)} adapters ({', '.join(sorted(adapters))}); "
            "save a file with one of them"
        )
    return named


def _check_shapes(
    named: Mapping[str, Mapping[str, PtTensor]], base: Shapes, rows: int, source: str
) -> None:
    """Hold every adapter against the weight it adapts, in the layout of the folder."""
    found: dict[str, tuple[int, ...]] = {}
    expected: dict[str, tuple[int, ...]] = {}
    for module, leaves in named.items():
        for leaf, tensor in leaves.items():
            found[f"{module}.{leaf}"] = tuple(reversed(tensor.shape))
        weight = base.get(f"{module}.weight", ())
        if len(weight) != 2:
            continue
        inner, outer = (rows, weight[1]) if module == EMBEDDING else (weight[1], weight[0])
        rank = leaves["lora_a"].shape[0] if "lora_a" in leaves else 1
        expected[f"{module}.lora_a"] = (inner, rank)
        expected[f"{module}.lora_b"] = (rank, outer)
        if "m" in leaves and module != EMBEDDING:
            expected[f"{module}.m"] = (outer,)
    check_tensors(expected, found, source=f"{source} (adapters)")


def _kind(named: Mapping[str, Mapping[str, PtTensor]], source: str) -> Literal["lora", "dora"]:
    """DoRA where the linear modules have magnitudes; the embedding never has."""
    linear = [module for module in named if module != EMBEDDING]
    plain = [module for module in linear if "m" not in named[module]]
    if not linear or len(plain) == len(linear):
        return "lora"
    if plain:
        raise ValueError(
            f"{source}: {len(plain)} of {len(linear)} linear modules have no DoRA magnitude, first "
            f"{plain[0]}; an adapter folder is all LoRA or all DoRA"
        )
    return "dora"
