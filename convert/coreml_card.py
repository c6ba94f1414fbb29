"""The card of a Core ML bundle: how to call the package, what it needs, under which licence."""

from collections.abc import Sequence

from convert.coreml_describe import Feature, PackageDescription
from openelm_mlx.config import ModelArgs

_CACHE_BYTES = 2  # fp16
_SHOWN_CONTEXTS = (512, 1024, 2048)

_ABOUT = {
    "config.json": "the architecture",
    "tokenizer.json": "the tokenizer, for swift-transformers and Python's `tokenizers`",
    "tokenizer_config.json": "its special tokens (and chat template, if the model chats)",
    "tokenizer.model": "the tokenizer as SentencePiece has it: what the model was trained with",
    "generation.json": "context, prefill size, end ids, stop texts, sampler settings",
    "tokenizer_check.json": "texts and their ids: run them through your app's tokenizer once",
    "OpenELMRunner.swift": "loads the package and streams text; add it to your target",
}

_UNITS = {
    "all": "Its form is for CPU and GPU: load it with compute units `.cpuAndGPU`.",
    "gpu": "Its attention is the fused operation for the GPU: load it with `.cpuAndGPU`.",
    "ane": "Its form is for the Neural Engine: load it with `.cpuAndNeuralEngine`.",
}

_CALLING = {
    "static": """\
`position` is the index of the call's first token; `position` + q must not exceed the context.
All tokens but the last go through `prefill`, N at a time. Fill the last chunk up with zeros: what
they write is overwritten before it is read. Where N more positions do not fit, begin that chunk
earlier, with tokens that are in the cache already. The last token goes through `decode`, whose
`logits` are those of the next token. One state, made once, serves both functions.
`OpenELMRunner.swift` does all this.""",
    "stateless": """\
As a package with states (`position` is the index of the call's first token; all tokens but the
last go through `prefill` in chunks of N, the last chunk filled up with zeros or begun earlier near
the end of the context; the last token through `decode`), but the caches are inputs and outputs:
begin with zeros and pass `newKeyCache` and `newValueCache` on as the next call's `keyCache` and
`valueCache`.""",
    "flexible": """\
Made for swift-transformers' `LanguageModel`: the whole prompt in one call, then one token a call.
`fullAttentionMask` is [1, 1, q, total], total counting all tokens so far: 0 where a token may look,
-65504 where not. Row q - 1 of `logits` is that of the next token. Give it the bundle's tokenizer,
or it looks for one on the Hub:

```swift
let tokenizer = try await AutoTokenizer.from(modelFolder: files)
let model = try LanguageModel.loadCompiled(url: url, tokenizer: tokenizer)
```""",
    "ane": """\
One function of q tokens. Column j of `update_mask` has a 1 in the row where token j is written
(leave columns of padding empty: they write nothing); `attn_mask` is 0 where a token may look and
-65504 where not, over all rows of the cache. Row r of `logits` follows token r. Shaped as packages
that were seen on the Neural Engine; this one was never run on a device here.""",
}


def card(
    description: PackageDescription,
    *,
    package: str,
    model: str,
    args: ModelArgs,
    licence: str | None,
    licence_files: Sequence[str],
    files: Sequence[str],
) -> str:
    """The ``README.md`` of a bundle.

    Args:
        description: of the package.
        package: its name.
        model: the name of the model folder or repository that it was made from.
        args: of the model.
        licence: the model's, None where its files do not say.
        licence_files: names of the licence texts in the bundle.
        files: all names in the bundle.
    """
    metadata = description.metadata
    interface = metadata.get("openelm.interface", "static")
    size = description.bytes / 1e6
    parts = [
        _front_matter(licence),
        f"# {package}",
        f"{model} ({args.num_parameters / 1e6:.1f} M parameters) for Core ML: iOS 18, macOS 15 or "
        f"newer, {size:.1f} MB, weights {metadata.get('openelm.weights', 'as stored')}, context "
        f"{metadata.get('openelm.context', '?')} tokens. "
        f"{_UNITS[metadata.get('openelm.target', 'all')]} Made by openelm-mlx.",
        "## Files",
        "\n".join(f"- `{name}`: {_ABOUT[name]}" for name in files if name in _ABOUT)
        + "\n- `parity.json`, once verified: the package's numbers against the model's in MLX",
    ]
    if "OpenELMRunner.swift" in files:
        parts += ["## In an app", _app(package)]
    parts += [
        "## Calling it",
        _table(description),
        _CALLING.get(interface, ""),
        "## Memory",
        _memory(args, description),
        "## Verified",
        "`parity.json` (for people `parity.md`) says what was compared, how far, and with what "
        "result; `openelm convert verify-coreml` writes it. Without that file nothing was.",
        "## Licence",
        _licence(licence, licence_files),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front_matter(licence: str | None) -> str:
    stated = f"license: {licence}\n" if licence else ""
    return f"---\nlibrary_name: coreml\n{stated}tags: [openelm, coreml, text-generation]\n---"


def _app(package: str) -> str:
    stem = package.removesuffix(".mlpackage")
    return f"""\
1. Drag `{package}` into the Xcode project (it becomes `{stem}.mlmodelc` in the app) and this folder
   as a folder reference; add `OpenELMRunner.swift` to the target.
2. Add the package https://github.com/huggingface/swift-transformers (1.0 or newer), product
   `Transformers`.
3. Call it:

```swift
let model = Bundle.main.url(forResource: "{stem}", withExtension: "mlmodelc")!
let files = Bundle.main.url(forResource: "{stem}-bundle", withExtension: nil)!
let runner = try await OpenELMRunner(model: model, bundle: files)
for try await text in try await runner.generate("Once upon a time", maxTokens: 64) {{
    print(text, terminator: "")
}}
```"""


def _table(description: PackageDescription) -> str:
    rows = ["| function | what | name | type | shape |", "|---|---|---|---|---|"]
    for name, function in description.functions.items():
        groups: tuple[tuple[str, dict[str, Feature]], ...] = (
            ("input", function.inputs),
            ("state", function.states),
            ("output", function.outputs),
        )
        rows += [
            f"| `{name}` | {kind} | `{f.name}` | {f.dtype} | {f.shape_text if f.shape else 'any'} |"
            for kind, features in groups
            for f in features.values()
        ]
    return "\n".join(rows)


def _memory(args: ModelArgs, description: PackageDescription) -> str:
    per_token = 2 * sum(args.num_kv_heads) * args.head_dim * _CACHE_BYTES
    stated = description.metadata.get("openelm.context", "")
    contexts = {*_SHOWN_CONTEXTS, *([int(stated)] if stated.isdecimal() else [])}
    rows = ["| context | fp16 cache, MB |", "|---|---|"]
    for context in sorted(contexts):
        here = " (this package)" if str(context) == stated else ""
        rows.append(f"| {context}{here} | {per_token * context / 1e6:.1f} |")
    return (
        f"The weights, {description.bytes / 1e6:.1f} MB, and the cache, {per_token} bytes a token, "
        "allocated for the whole context:\n\n" + "\n".join(rows)
    )


def _licence(licence: str | None, files: Sequence[str]) -> str:
    name = (
        f"The weights keep the model's licence: {licence}"
        if licence
        else ("The model's files do not name a licence: find out before you ship the weights")
    )
    texts = f" ({', '.join(f'`{file}`' for file in files)})" if files else ""
    return (
        f"{name}{texts}. The tokenizer of Apple's models is Meta's LLaMA tokenizer under its own "
        "terms. `OpenELMRunner.swift` is MIT, as openelm-mlx."
    )
