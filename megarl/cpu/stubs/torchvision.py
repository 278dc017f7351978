"""Stands in for torchvision in an engine on a CPU: what SGLang and `transformers` import at the start, for images.

The only build of torchvision in the package index is linked against CUDA. With it installed, `transformers` imports no
model beside torch's CPU build, so there is none; and an engine of text calls nothing of it.
"""

import sys
from enum import Enum
from types import ModuleType
from typing import Any

__version__ = "0.28.0"  # what SGLang 0.5.23 asks for
__path__: list[str] = []


class InterpolationMode(Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def _module(name: str, **names: Any) -> ModuleType:
    module = ModuleType(f"{__name__}.{name}")
    module.__dict__.update(names, __path__=[])
    return sys.modules.setdefault(module.__name__, module)


_functional = _module("transforms.functional", InterpolationMode=InterpolationMode, pil_to_tensor=None)
_v2_functional = _module("transforms.v2.functional", InterpolationMode=InterpolationMode)
_v2 = _module("transforms.v2", functional=_v2_functional)
transforms = _module("transforms", InterpolationMode=InterpolationMode, functional=_functional, v2=_v2)
io = _module("io", ImageReadMode=None, decode_image=None, decode_jpeg=None)
