"""Pretrained weights from files of safetensors or PyTorch, whatever their names and axes are.

A layout maps the names in a file to paths in a network. Those of published families are in `LAYOUTS`; each leads to the
networks in `transformers`. A dict of the same form describes any other.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path as File
from typing import Any

import numpy as np

from pfljax.contract import optional
from pfljax.contract.errors import ArgumentError
from pfljax.contract.paths import expanded
from pfljax.models import standardizing
from pfljax.models.frozen import Frozen, described, named, named_leaves, tensor_to_array
from pfljax.models.standardizing import SCALING, Statistics
from pfljax.models.structure import Path

__all__ = ["LAYOUTS", "Layout", "Saved"]


def __dir__() -> list[str]:
    return __all__


# Regular expression of names in a file -> path in the network, or several; "" if the array is not used. A name's groups
# replace \\1, \\2. After the path, " ^T" transposes; " [1/3]" takes the second third of the first axis, and
# " [..., 1/3]" of the last. Then the array is reshaped.
Layout = Mapping[str, str | Sequence[str]]
T = " ^T"  # PyTorch keeps a dense layer's weight as (outputs, inputs)
PICKLED = (".pt", ".pth", ".bin")  # suffixes of PyTorch's files
SLICE = re.compile(r"(.*) \[(\.\.\., )?(\d+)/(\d+)\]")


def layer(name: str, path: str, transposed: str = T) -> dict[str, str]:
    """A dense layer or convolution of PyTorch's."""
    return {rf"{name}\.weight": f"{path}/kernel{transposed}", rf"{name}\.bias": f"{path}/bias"}


def norm(name: str, path: str) -> dict[str, str]:
    """A normalization layer of PyTorch's."""
    return {rf"{name}\.weight": f"{path}/scale", rf"{name}\.bias": f"{path}/bias"}


def batch_norm(name: str, path: str) -> dict[str, str]:
    """A batch normalization of PyTorch's, with its running statistics."""
    return {
        **norm(name, path),
        rf"{name}\.running_mean": f"batch_stats/{path}/mean",
        rf"{name}\.running_var": f"batch_stats/{path}/var",
        rf"{name}\.num_batches_tracked": "",
    }


def attention(name: str, layers: str) -> dict[str, str]:
    """A block's attention, whose queries, keys, values and outputs are the dense layers of these names."""
    layout = {}
    for source, target in zip(layers.split(), ("query", "key", "value", "out"), strict=True):
        layout |= layer(rf"{name}\.{source}", f"{BLOCK}/attention/{target}")
    return layout


def thirds(leaf: str) -> list[str]:
    """Queries, keys and values in one array."""
    names = ("query", "key", "value")
    return [f"{BLOCK}/attention/{name}/{leaf} [..., {third}/3]" for third, name in enumerate(names)]


BLOCK = r"block_\1"
IMAGES = {
    r".*embeddings\.cls_token": "class_token",
    r".*embeddings\.mask_token": "",
    r".*embeddings\.position_embeddings": "positions",
    **layer(r".*embeddings\.patch_embeddings\.projection", "patches"),
    **attention(
        r".*encoder\.layer\.(\d+)\.attention",
        r"attention\.query attention\.key attention\.value output\.dense",
    ),
}
LAYOUTS: dict[str, Layout] = {
    "vit": {
        **IMAGES,
        **norm(r".*encoder\.layer\.(\d+)\.layernorm_before", f"{BLOCK}/attention_norm"),
        **norm(r".*encoder\.layer\.(\d+)\.layernorm_after", f"{BLOCK}/mlp_norm"),
        **layer(r".*encoder\.layer\.(\d+)\.intermediate\.dense", f"{BLOCK}/mlp/up"),
        **layer(r".*encoder\.layer\.(\d+)\.output\.dense", f"{BLOCK}/mlp/down"),
        **norm(r"(?:vit\.)?layernorm", "norm"),
        **layer("classifier", "head"),
        r".*pooler\..*": "",
    },
    "dinov2": {
        **IMAGES,
        **norm(r".*encoder\.layer\.(\d+)\.norm1", f"{BLOCK}/attention_norm"),
        **norm(r".*encoder\.layer\.(\d+)\.norm2", f"{BLOCK}/mlp_norm"),
        r".*encoder\.layer\.(\d+)\.layer_scale1\.lambda1": f"{BLOCK}/attention_scale",
        r".*encoder\.layer\.(\d+)\.layer_scale2\.lambda1": f"{BLOCK}/mlp_scale",
        **layer(r".*encoder\.layer\.(\d+)\.mlp\.fc1", f"{BLOCK}/mlp/up"),
        **layer(r".*encoder\.layer\.(\d+)\.mlp\.fc2", f"{BLOCK}/mlp/down"),
        **norm(r"(?:dinov2\.)?layernorm", "norm"),
        r"classifier\..*": "",  # a head on class token and patches together
    },
    "dinov3": {
        r".*embeddings\.cls_token": "class_token",
        r".*embeddings\.register_tokens": "registers",
        r".*embeddings\.mask_token": "",
        **layer(r".*embeddings\.patch_embeddings", "patches"),
        **attention(r".*layer\.(\d+)\.attention", "q_proj k_proj v_proj o_proj"),
        **norm(r".*layer\.(\d+)\.norm1", f"{BLOCK}/attention_norm"),
        **norm(r".*layer\.(\d+)\.norm2", f"{BLOCK}/mlp_norm"),
        r".*layer\.(\d+)\.layer_scale1\.lambda1": f"{BLOCK}/attention_scale",
        r".*layer\.(\d+)\.layer_scale2\.lambda1": f"{BLOCK}/mlp_scale",
        **layer(r".*layer\.(\d+)\.mlp\.gate_proj", f"{BLOCK}/mlp/gate"),
        **layer(r".*layer\.(\d+)\.mlp\.up_proj", f"{BLOCK}/mlp/up"),
        **layer(r".*layer\.(\d+)\.mlp\.down_proj", f"{BLOCK}/mlp/down"),
        **norm(r"(?:model\.)?norm", "norm"),
    },
    "clip": {
        # transformers' names
        r"vision_model\.embeddings\.class_embedding": "class_token",
        r"vision_model\.embeddings\.position_embedding\.weight": "positions",
        r"vision_model\.embeddings\.position_ids": "",
        **layer(r"vision_model\.embeddings\.patch_embedding", "patches"),
        **norm(r"vision_model\.pre_layrnorm", "input_norm"),
        **attention(
            r"vision_model\.encoder\.layers\.(\d+)\.self_attn", "q_proj k_proj v_proj out_proj"
        ),
        **norm(r"vision_model\.encoder\.layers\.(\d+)\.layer_norm1", f"{BLOCK}/attention_norm"),
        **norm(r"vision_model\.encoder\.layers\.(\d+)\.layer_norm2", f"{BLOCK}/mlp_norm"),
        **layer(r"vision_model\.encoder\.layers\.(\d+)\.mlp\.fc1", f"{BLOCK}/mlp/up"),
        **layer(r"vision_model\.encoder\.layers\.(\d+)\.mlp\.fc2", f"{BLOCK}/mlp/down"),
        **norm(r"vision_model\.post_layernorm", "norm"),
        **layer("visual_projection", "head"),
        # OpenAI's names
        r"visual\.class_embedding": "class_token",
        r"visual\.positional_embedding": "positions",
        **layer(r"visual\.conv1", "patches"),
        **norm(r"visual\.ln_pre", "input_norm"),
        r"visual\.transformer\.resblocks\.(\d+)\.attn\.in_proj_weight": [
            target + T for target in thirds("kernel")
        ],
        r"visual\.transformer\.resblocks\.(\d+)\.attn\.in_proj_bias": thirds("bias"),
        **layer(r"visual\.transformer\.resblocks\.(\d+)\.attn\.out_proj", f"{BLOCK}/attention/out"),
        **norm(r"visual\.transformer\.resblocks\.(\d+)\.ln_1", f"{BLOCK}/attention_norm"),
        **norm(r"visual\.transformer\.resblocks\.(\d+)\.ln_2", f"{BLOCK}/mlp_norm"),
        **layer(r"visual\.transformer\.resblocks\.(\d+)\.mlp\.c_fc", f"{BLOCK}/mlp/up"),
        **layer(r"visual\.transformer\.resblocks\.(\d+)\.mlp\.c_proj", f"{BLOCK}/mlp/down"),
        **norm(r"visual\.ln_post", "norm"),
        r"visual\.proj": "head/kernel",
        # the text encoder
        r"text_model\..*|transformer\..*|token_embedding\..*|ln_final\..*": "",
        r"positional_embedding|text_projection(\.weight)?|logit_scale": "",
        r"input_resolution|context_length|vocab_size": "",
    },
    "resnet": {
        **layer("conv1", "conv1"),
        **batch_norm("bn1", "bn1"),
        **layer(r"layer(\d)\.(\d+)\.conv(\d)", r"layer\1_\2/conv\3"),
        **batch_norm(r"layer(\d)\.(\d+)\.bn(\d)", r"layer\1_\2/bn\3"),
        **layer(r"layer(\d)\.(\d+)\.downsample\.0", r"layer\1_\2/downsample_conv"),
        **batch_norm(r"layer(\d)\.(\d+)\.downsample\.1", r"layer\1_\2/downsample_bn"),
        **layer("fc", "head"),
    },
    "mobilenet_v2": {
        **layer(r"features\.0\.0", "first_conv"),
        **batch_norm(r"features\.0\.1", "first_bn"),
        # The block without expansion
        **layer(r"features\.(1)\.conv\.0\.0", r"block_\1/depthwise_conv"),
        **batch_norm(r"features\.(1)\.conv\.0\.1", r"block_\1/depthwise_bn"),
        **layer(r"features\.(1)\.conv\.1", r"block_\1/project_conv"),
        **batch_norm(r"features\.(1)\.conv\.2", r"block_\1/project_bn"),
        # All other blocks
        **layer(r"features\.(\d+)\.conv\.0\.0", r"block_\1/expand_conv"),
        **batch_norm(r"features\.(\d+)\.conv\.0\.1", r"block_\1/expand_bn"),
        **layer(r"features\.(\d+)\.conv\.1\.0", r"block_\1/depthwise_conv"),
        **batch_norm(r"features\.(\d+)\.conv\.1\.1", r"block_\1/depthwise_bn"),
        **layer(r"features\.(\d+)\.conv\.2", r"block_\1/project_conv"),
        **batch_norm(r"features\.(\d+)\.conv\.3", r"block_\1/project_bn"),
        **layer(r"features\.\d+\.0", "last_conv"),
        **batch_norm(r"features\.\d+\.1", "last_bn"),
        **layer(r"classifier\.1", "head"),
    },
    "bert": {
        r".*embeddings\.word_embeddings\.weight": "embedding/embedding",
        r".*embeddings\.position_embeddings\.weight": "positions",
        r".*embeddings\.token_type_embeddings\.weight": "type [0/2]",
        r".*embeddings\.position_ids": "",
        **norm(r".*embeddings\.LayerNorm", "embedding_norm"),
        **attention(
            r".*encoder\.layer\.(\d+)\.attention",
            r"self\.query self\.key self\.value output\.dense",
        ),
        **norm(r".*encoder\.layer\.(\d+)\.attention\.output\.LayerNorm", f"{BLOCK}/attention_norm"),
        **layer(r".*encoder\.layer\.(\d+)\.intermediate\.dense", f"{BLOCK}/mlp/up"),
        **layer(r".*encoder\.layer\.(\d+)\.output\.dense", f"{BLOCK}/mlp/down"),
        **norm(r".*encoder\.layer\.(\d+)\.output\.LayerNorm", f"{BLOCK}/mlp_norm"),
        **layer(r".*pooler\.dense", "pooler"),
        **layer("classifier", "head"),
        r"cls\..*": "",
    },
    "gpt2": {
        r".*wte\.weight": "embedding/embedding",
        r".*wpe\.weight": "positions",
        **norm(r".*h\.(\d+)\.ln_1", f"{BLOCK}/attention_norm"),
        **norm(r".*h\.(\d+)\.ln_2", f"{BLOCK}/mlp_norm"),
        **norm(r".*ln_f", "norm"),
        r".*h\.(\d+)\.attn\.c_attn\.weight": thirds("kernel"),
        r".*h\.(\d+)\.attn\.c_attn\.bias": thirds("bias"),
        **layer(r".*h\.(\d+)\.attn\.c_proj", f"{BLOCK}/attention/out", ""),
        **layer(r".*h\.(\d+)\.mlp\.c_fc", f"{BLOCK}/mlp/up", ""),
        **layer(r".*h\.(\d+)\.mlp\.c_proj", f"{BLOCK}/mlp/down", ""),
        r".*\.attn\.(?:masked_)?bias": "",
        r"lm_head\.weight": "",  # the embedding
    },
    "qwen3": {
        r".*embed_tokens\.weight": "embedding/embedding",
        **attention(r".*layers\.(\d+)\.self_attn", "q_proj k_proj v_proj o_proj"),
        r".*layers\.(\d+)\.self_attn\.q_norm\.weight": f"{BLOCK}/attention/query_norm/scale",
        r".*layers\.(\d+)\.self_attn\.k_norm\.weight": f"{BLOCK}/attention/key_norm/scale",
        **layer(r".*layers\.(\d+)\.mlp\.gate_proj", f"{BLOCK}/mlp/gate"),
        **layer(r".*layers\.(\d+)\.mlp\.up_proj", f"{BLOCK}/mlp/up"),
        **layer(r".*layers\.(\d+)\.mlp\.down_proj", f"{BLOCK}/mlp/down"),
        r".*layers\.(\d+)\.input_layernorm\.weight": f"{BLOCK}/attention_norm/scale",
        r".*layers\.(\d+)\.post_attention_layernorm\.weight": f"{BLOCK}/mlp_norm/scale",
        r"(?:model\.)?norm\.weight": "norm/scale",
        r"lm_head\.weight": f"head/kernel{T}",
    },
}


class Saved(Frozen):
    """Weights in a safetensors file or a state dict of PyTorch's, which is read when the network is known.

    Files that end in .pt, .pth or .bin are read by PyTorch, with `weights_only=True`, which runs no code in them.

    Attributes:
        file: The file.
        source: Its name, for messages.
        layout: The layout; None: names are the network's paths.

    Examples:
        >>> import pathlib, tempfile
        >>> import jax, jax.numpy as jnp, safetensors.flax
        >>> import pfljax as pfl
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "weights.safetensors"
        >>> weights = {"Dense_0/kernel": jnp.ones((5, 3)), "Dense_0/bias": jnp.zeros(3)}
        >>> safetensors.flax.save_file(weights, file)
        >>> network = pfl.models.MLP((), outputs=3)
        >>> x = jnp.zeros((1, 5))
        >>> model = pfl.Model(network, x, frozen=pfl.models.weights.Saved(file), trainable="bias")
        >>> model.apply(model.init(jax.random.key(0)), jnp.ones((1, 5))).tolist()
        [[5.0, 5.0, 5.0]]
    """

    def __init__(self, path: str | File, layout: str | Layout = ""):
        """Checks that the file exists.

        Args:
            path: The file.
            layout: Name of a layout in `LAYOUTS`, or a layout; "": names are the network's paths, with "." or "/".

        Raises:
            ArgumentError: for an unknown layout, or a file that does not exist. Nothing is downloaded.
        """
        if not isinstance(path, str | os.PathLike):
            text = f"is {type(path).__name__}; accepted: the path of a safetensors file"
            raise ArgumentError("frozen", text)
        file = File(expanded(path, "frozen"))
        if not file.is_file():
            text = f"no file {file.absolute()}; weights are not downloaded: save them there as safetensors"
            raise ArgumentError("frozen", text, str(path))
        if isinstance(layout, str) and layout and layout not in LAYOUTS:
            text = f"accepted: {', '.join(LAYOUTS)}, or a dict of names and paths"
            raise ArgumentError("layout", text, layout)
        self.file = file
        self.source = file.name
        self._cache = {}
        if isinstance(layout, str) and layout:
            layout = LAYOUTS[layout]
        self.layout = layout or None

    def values(
        self, shapes: Mapping[Path, Any], constants: Collection[Path] = ()
    ) -> dict[Path, np.ndarray]:
        return self.once(described(shapes), lambda: self._read(shapes, constants))

    @property
    def statistics(self) -> Statistics:
        if self.layout is not None:
            return {}
        return self.once("statistics", self._read_statistics)

    def _read_statistics(self) -> Statistics:
        arrays = self._arrays(is_scaling)
        by_path = {tuple(name.split("/")): array for name, array in arrays.items()}
        _, statistics = standardizing.split(by_path)
        return statistics

    def _arrays(self, wanted: Callable[[str], bool]) -> dict[str, np.ndarray]:
        """The file's arrays by name, as far as their names are wanted."""
        if self.file.suffix in PICKLED:
            return {name: array for name, array in self._unpickled().items() if wanted(name)}
        safetensors = optional.load("safetensors", "frozen")
        try:
            with safetensors.safe_open(self.file, framework="numpy") as file:
                names = [name for name in file.keys() if wanted(name)]  # noqa: SIM118
                return {name: file.get_tensor(name) for name in names}
        except Exception as error:
            text = f"{self.source} is no safetensors file: {error}"
            raise ArgumentError("frozen", text, str(self.file)) from error

    def _unpickled(self) -> dict[str, np.ndarray]:
        """The arrays in a file of PyTorch's, which is read without running code in it."""
        torch = optional.load("torch", "frozen")
        accepted = "accepted: a state dict, as torch.save(module.state_dict(), path) writes it"
        try:
            state = torch.load(self.file, map_location="cpu", weights_only=True)
        except Exception as error:
            line = str(error).partition("\n")[0]
            raise ArgumentError("frozen", f"{self.source}: {accepted} ({line})") from error
        if isinstance(state, Mapping) and isinstance(state.get("state_dict"), Mapping):
            state = state["state_dict"]
        if not isinstance(state, Mapping) or not all(map(torch.is_tensor, state.values())):
            raise ArgumentError("frozen", f"{self.source}: {accepted}")
        return {name: tensor_to_array(tensor) for name, tensor in state.items()}

    def _read(
        self, shapes: Mapping[Path, Any], constants: Collection[Path]
    ) -> dict[Path, np.ndarray]:
        """The arrays by path in a network with these shapes."""

        def wanted(name: str) -> bool:
            return self.layout is not None or not is_scaling(name)

        values: dict[Path, np.ndarray] = {}
        for name, array in self._arrays(wanted).items():
            for target in self._targets(name):
                path, value = placed(target, array)
                if path in constants:
                    continue
                if path not in shapes:
                    text = f"{self.source}: {name} belongs to {'/'.join(path)}, which the network lacks"
                    raise ArgumentError("frozen", f"{text}; it has {named(shapes)}")
                shape = shapes[path].shape
                if self.layout is not None and value.size == shapes[path].size:
                    value = value.reshape(shape)
                values[path] = value
        return values

    def _targets(self, name: str) -> list[str]:
        """Where an array of the file belongs."""
        if self.layout is None:
            return [name if "/" in name else name.replace(".", "/")]
        for pattern, targets in self.layout.items():
            match = re.fullmatch(pattern, name)
            if match:
                targets = [targets] if isinstance(targets, str) else targets
                return [match.expand(target) for target in targets if target]
        raise ArgumentError("frozen", f"{self.source}: the layout knows no {name}")


def is_scaling(name: str) -> bool:
    """Whether an array of a file is a mean or standard deviation of inputs."""
    return name.startswith(f"{SCALING}/")


def as_bytes(variables: Any) -> bytes:
    """The content of a safetensors file with a module's variables, named by their paths; `Saved` reads it."""
    save = optional.load("safetensors.numpy", "frozen").save
    arrays = {}
    for path, leaf in named_leaves(variables).items():
        # A state dict of PyTorch's has the names that PyTorch expects.
        name = ".".join(path) if ".".join(path) in variables else "/".join(path)
        arrays[name] = np.ascontiguousarray(leaf)
    return save(arrays)


def placed(target: str, array: np.ndarray) -> tuple[Path, np.ndarray]:
    """The path and the array that a target of a layout describes."""
    if target.endswith(T):
        target = target.removesuffix(T)
        # (O, C, *W) -> (*W, C, O)
        array = array.T if array.ndim == 2 else np.moveaxis(array, (0, 1), (-1, -2))
    match = SLICE.fullmatch(target)
    if match:
        target, last_axis, number, total = match.groups()
        axis = -1 if last_axis else 0
        array = np.split(array, int(total), axis)[int(number)]
    return tuple(target.split("/")), array
