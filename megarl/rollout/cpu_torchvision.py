"""Lets torchvision's published wheel, which is linked against CUDA, be imported beside torch's CPU build.

torchvision registers shape functions for operators that its compiled library would have defined. That library does
not load here, so the operators' schemas are defined just before torchvision is imported. SGLang and the model code
of transformers import torchvision for images only, but they do so always.
"""

from __future__ import annotations

import importlib.abc
import sys
from typing import Any

_ROI = "float spatial_scale, SymInt pooled_height, SymInt pooled_width"
_SIZE = "SymInt batch_size, SymInt channels, SymInt height, SymInt width"
_DEFORM = (
    "SymInt stride_h, SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, "
    "SymInt groups, SymInt offset_groups, bool use_mask"
)
_IMAGE = "Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias"
_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    f"roi_align(Tensor input, Tensor rois, {_ROI}, int sampling_ratio, bool aligned) -> Tensor",
    f"_roi_align_backward(Tensor grad, Tensor rois, {_ROI}, {_SIZE}, int sampling_ratio, bool aligned) -> Tensor",
    f"roi_pool(Tensor input, Tensor rois, {_ROI}) -> (Tensor, Tensor)",
    f"_roi_pool_backward(Tensor grad, Tensor rois, Tensor argmax, {_ROI}, {_SIZE}) -> Tensor",
    f"ps_roi_align(Tensor input, Tensor rois, {_ROI}, int sampling_ratio) -> (Tensor, Tensor)",
    "_ps_roi_align_backward(Tensor grad, Tensor rois, Tensor channel_mapping, "
    f"{_ROI}, int sampling_ratio, {_SIZE}) -> Tensor",
    f"ps_roi_pool(Tensor input, Tensor rois, {_ROI}) -> (Tensor, Tensor)",
    f"_ps_roi_pool_backward(Tensor grad, Tensor rois, Tensor channel_mapping, {_ROI}, {_SIZE}) -> Tensor",
    f"deform_conv2d({_IMAGE}, {_DEFORM}) -> Tensor",
    f"_deform_conv2d_backward(Tensor grad, {_IMAGE}, {_DEFORM}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Finds nothing; defines the schemas when torchvision is looked for. They live as long as the library object."""

    library: Any = None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torchvision" and self.library is None:
            import torch

            library = torch.library.Library("torchvision", "FRAGMENT")
            for schema in _SCHEMAS:
                library.define(schema)
            type(self).library = library
        return None


def install() -> None:
    """Make torchvision importable in this process; to be called before it is imported. Does no harm twice."""
    if "torchvision" not in sys.modules and not any(isinstance(f, _BeforeTorchvision) for f in sys.meta_path):
        sys.meta_path.insert(0, _BeforeTorchvision())
