"""How byte-level BPE vocabularies cut text into words before merging, by `tokenizer.ggml.pre`.

Each pattern cuts what the one before it left: matches and the text between them are both kept.
Patterns are those of the models' own tokenizer.json, with contractions spelt out in both cases
as llama.cpp does.
"""

from dataclasses import dataclass

from jaxllm.errors import TokenizerError, shown

_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_SYMBOLS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|"
_LLAMA3 = _WORDS + r"\p{N}{1,3}" + _SYMBOLS + _SPACES
_QWEN2 = _WORDS + r"\p{N}" + _SYMBOLS + _SPACES
_QWEN35 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES
)
_GPT4O = (
    f"{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
)
_TEKKEN = f"{_UPPER}*{_LOWER}+|{_UPPER}+{_LOWER}*|" + r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES,
)
_DEEPSEEK_CODER = (
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    r"[一-龥\u0800-一\uac00-\ud7ff]+",
    r"\p{N}",
)
_BAILING = (
    r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
_SEED = _WORDS + r"\p{N}| ?[^\s\p{L}\p{N}\r\n]+|" + _SPACES
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")


@dataclass(frozen=True)
class PreTokenizer:
    """`ignore_merges`: a word that is a token is taken whole; `add_bos`: the default for files
    that do not say; `byte_level`: False where merges work on raw text with U+2581 for spaces."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    byte_level: bool = True


_GROUPS: tuple[tuple[PreTokenizer, str], ...] = (
    (PreTokenizer(_DEFAULT), "default"),
    (
        PreTokenizer((_GPT2,)),
        "gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum "
        "modern-bert jina-es jina-de jina-v2-es jina-v2-de",
    ),
    (
        PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
    ),
    (PreTokenizer((_LLAMA3,)), "dbrx smaug-bpe chatglm-bpe glm4"),
    (
        PreTokenizer((_QWEN2,)),
        "qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 hunyuan megrez grok-2 solar-open",
    ),
    (PreTokenizer((_QWEN35,)), "qwen35"),
    (
        PreTokenizer((r"\p{N}", _GPT2)),
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
    ),
    (
        PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
        "falcon",
    ),
    (PreTokenizer((_GPT4O,)), "gpt-4o llama4 kanana2 talkie minimax-m2"),
    (PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True), "tekken"),
    (PreTokenizer(_DEEPSEEK3), "deepseek-v3 hunyuan-dense joyai-llm"),
    (PreTokenizer(_DEEPSEEK_CODER), "deepseek-coder"),
    (PreTokenizer((_BAILING,)), "bailingmoe bailingmoe2 llada-moe"),
    (PreTokenizer((_SEED,)), "seed-coder"),
    (PreTokenizer((r"[^\n]+|\n+",), byte_level=False), "gemma4"),
)
PRETOKENIZERS = {name: pre for pre, names in _GROUPS for name in names.split()}


def find_pretokenizer(name: str) -> PreTokenizer:
    """TokenizerError for a name that is not known, naming those that are."""
    if name not in PRETOKENIZERS:
        raise TokenizerError(
            f"pre-tokenizer {shown(name)} is not supported; known ones are "
            f"{', '.join(sorted(PRETOKENIZERS))}."
        )
    return PRETOKENIZERS[name]
