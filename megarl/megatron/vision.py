"""The language model of a vision-language model, with transformers' vision tower on the first pipeline stage.

Each rank of that stage runs the tower on the images that some of its tokens belong to: tokens are split over tensor
parallel (sequence parallelism) and context parallel ranks, so most images are processed by one of them. A gradient of
the tower is the sum over these ranks, as that of a norm. Images that occur more than once in a micro-batch, such as
those of a group of samples, are processed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_layer import TransformerLayer

from megarl.config import Config
from megarl.megatron.micro_batch import VisionBatch
from megarl.models.family import VisionFamily
from megarl.parallel import device

ReadPixels = Callable[[bytes], torch.Tensor]
"""Returns the patches of an encoded image, [patches, values] fp32."""


class MultimodalRope(torch.nn.Module):
    """Angles of rotary embeddings for positions in time, rows and columns."""

    def __init__(self, dim: int, base: float, section: Iterable[int], is_interleaved: bool) -> None:
        super().__init__()
        self.inv_freq = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)  # no buffer: stays fp32
        _, rows, columns = section
        axis = torch.zeros(dim // 2, dtype=torch.int64)  # by frequency: 0 turns by time, 1 by row, 2 by column
        if is_interleaved:
            axis[1 : 3 * rows : 3], axis[2 : 3 * columns : 3] = 1, 2
        else:
            axis[-rows - columns :], axis[-columns:] = 1, 2
        self.axis = axis

    def forward(self, positions: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Map positions [3, P] to angles [P, 1, 1, dim], those of the whole micro-batch on every rank."""
        if self.inv_freq.device != positions.device:
            self.inv_freq, self.axis = self.inv_freq.to(positions.device), self.axis.to(positions.device)
        angles = positions[self.axis].T.float() * self.inv_freq
        return torch.cat([angles, angles], dim=-1)[:, None, None]


class DeepstackLayer(TransformerLayer):  # type: ignore[misc]
    """Megatron's layer, which adds the tower's features for this layer, if there are any, to its output.

    The features come as `context`, [layers, s, b, hidden], which decoder layers pass on otherwise unused. So a
    recomputation sees those of its own micro-batch, and gradients reach the tower.
    """

    layer_number: int

    def forward(self, *args: Any, context: torch.Tensor | None = None, **kwargs: Any) -> Any:
        hidden, _ = super().forward(*args, context=None, **kwargs)
        if context is not None and self.layer_number <= len(context):
            hidden = hidden + context[self.layer_number - 1]
        return hidden, context


class VisionLanguageModel(GPTModel):  # type: ignore[misc]
    """A GPTModel whose inputs at image tokens are the features of a vision tower, `visual`."""

    def __init__(self, *args: Any, rope: MultimodalRope, tower: torch.nn.Module | None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rotary_pos_emb = rope
        if tower is not None:
            self.visual = tower

    def forward(
        self, *, vision: VisionBatch, read_pixels: ReadPixels, input_ids: torch.Tensor | None, **kwargs: Any
    ) -> Any:
        """Run a micro-batch. kwargs: as for GPTModel, with `position_ids` [3, P] of the whole micro-batch."""
        if self.pre_process:
            embedded = self.embedding(input_ids=input_ids, position_ids=None)
            kwargs["decoder_input"], context = self._insert_images(embedded, vision, read_pixels)
            if context is not None:
                kwargs["extra_block_kwargs"] = {"context": context}
        return super().forward(input_ids=input_ids, **kwargs)

    def _insert_images(
        self, embedded: torch.Tensor, vision: VisionBatch, read_pixels: ReadPixels
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return inputs and deepstack features, [s, b, hidden] and [layers, s, b, hidden], of this rank's tokens.

        embedded: embeddings of these tokens. Those of image tokens are replaced.
        """
        rows = vision.image_rows
        if self.config.sequence_parallel:
            rows = rows.chunk(parallel_state.get_tensor_model_parallel_world_size())[
                parallel_state.get_tensor_model_parallel_rank()
            ]
        is_trained = any(param.requires_grad for param in self.visual.parameters())
        if not bool((rows >= 0).any()):
            if is_trained and torch.is_grad_enabled():  # gradients of zero, for which Megatron's reduction waits
                embedded = embedded + 0.0 * sum(param.sum() for param in self.visual.parameters())
            if not self._num_deepstack:
                return embedded, None
            return embedded, embedded.new_zeros(self._num_deepstack, *embedded.shape)
        tokens = (rows >= 0).nonzero()[:, 0]
        features, feature_rows = self._features(vision, rows[tokens], read_pixels)
        tokens, feature_rows = tokens.to(embedded.device), feature_rows.to(embedded.device)

        def at_tokens(base: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            return base.index_copy(0, tokens, values[feature_rows, None].to(base.dtype))

        inputs, *deepstack = features
        if not self._num_deepstack:
            return at_tokens(embedded, inputs), None
        zeros = torch.zeros_like(embedded, requires_grad=False)
        return at_tokens(embedded, inputs), torch.stack([at_tokens(zeros, values) for values in deepstack])

    @property
    def _num_deepstack(self) -> int:
        return len(getattr(self.visual.config, "deepstack_visual_indexes", ()))

    def _features(
        self, vision: VisionBatch, image_rows: torch.Tensor, read_pixels: ReadPixels
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Run the tower on the distinct images of these rows among all image tokens.

        Returns its features, and those for each deepstack layer, [features, hidden]; and the index of each row in them.
        """
        sizes = torch.tensor([image.num_tokens for image in vision.images])
        starts = sizes.cumsum(0) - sizes
        image_of_row = torch.repeat_interleave(torch.arange(len(sizes)), sizes)[image_rows]
        offsets: dict[bytes, int] = {}  # of the features of each distinct image
        pixels, grids, shifts, count = [], [], torch.zeros_like(starts), 0
        for number in image_of_row.unique().tolist():
            image = vision.images[number]
            if image.data not in offsets:
                offsets[image.data] = count
                count += image.num_tokens
                pixels.append(read_pixels(image.data))
                grids.append(image.grid)
            shifts[number] = offsets[image.data] - starts[number]
        target = next(self.visual.parameters())
        with torch.set_grad_enabled(torch.is_grad_enabled() and target.requires_grad):
            # The tower converts the pixels to its dtype. The grids stay on the host: its loops read them.
            output = self.visual(
                torch.cat(pixels).to(target.device, target.dtype),
                grid_thw=torch.tensor(grids).to(target.device),
                return_dict=True,
            )
        features = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
        return features, image_rows + shifts[image_of_row]


def build_tower(hf: Mapping[str, Any], vision: VisionFamily, config: Config) -> torch.nn.Module:
    """Build transformers' vision tower with arbitrary weights."""
    from transformers.utils import is_flash_attn_2_available

    values = vision.config(hf)
    if hf["model_type"] == "qwen2_5_vl":
        from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig as config_class
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
            Qwen2_5_VisionTransformerPretrainedModel as model_class,
        )
    else:
        from transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe import Qwen3VLMoeVisionConfig as config_class
        from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeVisionModel as model_class
    settings = config_class(**{key: value for key, value in values.items() if key != "rope_parameters"})
    attention = "flash_attention_2" if device.has_cuda() and is_flash_attn_2_available() else "sdpa"
    tower: Any = model_class._from_config(settings, attn_implementation=attention, dtype=torch.float32)
    tower.requires_grad_(not config.model.freeze_vision_tower)
    if config.model.megatron.get("recompute_granularity") == "full":
        tower.gradient_checkpointing_enable({"use_reentrant": False})
    for param in tower.parameters():
        # Each tensor parallel rank has the gradient of its own tokens; Megatron sums those of marked parameters.
        param.sequence_parallel = config.parallel.tp > 1
    return tower  # type: ignore[no-any-return]


def restore_rope(tower: Any) -> None:
    """Restore the fp32 angles of the tower, which a conversion of the model to bf16 has rounded."""
    rope = tower.rotary_pos_emb
    exact = type(rope)(tower.config)
    rope.inv_freq, rope.original_inv_freq = (
        buffer.to(rope.inv_freq.device) for buffer in (exact.inv_freq, exact.original_inv_freq)
    )
