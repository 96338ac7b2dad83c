"""Weights of published families: their names, axes and arithmetic, in files that the tests make."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import pfljax as pfl
from pfljax.models.transformers import STYLES, Transformer, ViT

RNG = np.random.default_rng(0)
IMAGES, WIDE = (RNG.normal(size=(3, 8, columns, 3)).astype(np.float32) for columns in (8, 12))
TOKENS = RNG.integers(1, 20, (3, 9))
PADDED = np.where(np.arange(9) < np.array([[6], [9], [9]]), TOKENS, 0)
SIZES = {"width": 16, "depth": 2, "heads": 2}


def loaded(module, x, path, layout, trainable="head"):
    """The model with weights of a file, all of them frozen but for `trainable`."""
    frozen = pfl.models.weights.Saved(path, layout)
    return pfl.Model(
        module, jnp.asarray(x), frozen=frozen, trainable=trainable, frozen_dtype="float32"
    )


def test_axes_and_parts_of_arrays(tmp_path):
    """GPT-2's queries, keys and values are thirds of one array; PyTorch's convolutions have their outputs first."""

    def draw(*shape):
        return RNG.normal(size=shape).astype(np.float32)

    width = 6
    block = "transformer.h.0."
    gpt2 = {"transformer.wte.weight": draw(9, width), "transformer.wpe.weight": draw(5, width)}
    gpt2 |= {
        f"{block}attn.c_attn.weight": draw(width, 3 * width),
        f"{block}attn.c_attn.bias": draw(3 * width),
    }
    gpt2 |= {f"{block}attn.bias": draw(1, 1, 5, 5), "lm_head.weight": draw(9, width)}
    for name, pair in {
        "attn.c_proj": (width, width),
        "mlp.c_fc": (width, 24),
        "mlp.c_proj": (24, width),
    }.items():
        gpt2 |= {f"{block}{name}.weight": draw(*pair), f"{block}{name}.bias": draw(pair[1])}
    for name in (f"{block}ln_1", f"{block}ln_2", "transformer.ln_f"):
        gpt2 |= {f"{name}.weight": draw(width), f"{name}.bias": draw(width)}
    save_file(gpt2, tmp_path / "gpt2.safetensors")
    module = Transformer(9, width=width, depth=1, heads=2, length=5, tied=True)
    model = loaded(
        module, np.zeros((1, 5), np.int32), tmp_path / "gpt2.safetensors", "gpt2", "^norm/"
    )
    found = model.adapted.frozen_on_host["frozen"]
    whole = gpt2[f"{block}attn.c_attn.weight"]
    for part, name in enumerate(("query", "key", "value")):
        # two heads of three
        expected = whole[:, part * width : (part + 1) * width].reshape(width, 2, 3)
        np.testing.assert_array_equal(found[f"block_0/attention/{name}/kernel"], expected)
    np.testing.assert_array_equal(found["block_0/mlp/up/kernel"], gpt2[f"{block}mlp.c_fc.weight"])
    kernel = draw(4, 3, 2, 2)  # outputs, inputs, rows, columns
    path, placed = pfl.models.weights.placed("patches/kernel ^T", kernel)
    assert path == ("patches", "kernel") and placed.shape == (2, 2, 3, 4)
    assert placed[1, 0, 2, 3] == kernel[3, 2, 1, 0]


def test_a_name_that_a_layout_does_not_know(tmp_path):
    save_file({"tail.weight": np.zeros(2, np.float32)}, tmp_path / "w.safetensors")
    with pytest.raises(
        pfl.ArgumentError, match=r"w\.safetensors: the layout knows no tail\.weight"
    ):
        _ = loaded(ViT(5), IMAGES, tmp_path / "w.safetensors", "vit").network


def configurations(hf):
    """Name of a layout -> (the reference, our network, inputs, what is trained, the reference's outputs)."""
    common = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    image = {"image_size": 8, "patch_size": 4}
    mlp = {"intermediate_size": 32}
    words = {"vocab_size": 20}
    vit = hf.ViTConfig(**common, **image, **mlp, layer_norm_eps=1e-6, num_labels=5)
    dino = hf.Dinov2Config(**common, **image, mlp_ratio=2)
    dino3 = hf.DINOv3ViTConfig(
        **common, **image, **mlp, num_register_tokens=2, layerscale_value=0.5
    )
    gated = {"use_gated_mlp": True, "hidden_act": "silu"}
    dino3_gated = hf.DINOv3ViTConfig(
        **common, image_size=(8, 12), patch_size=4, **mlp, num_register_tokens=2, **gated
    )
    of_dino3 = dataclasses.replace(STYLES["dinov3"], registers=2)
    of_gated = dataclasses.replace(of_dino3, gated=True, activation="silu")
    wide = WIDE
    wide_inputs = {"pixel_values": WIDE.transpose(0, 3, 1, 2)}
    bert = hf.BertConfig(**common, **mlp, **words, max_position_embeddings=12, num_labels=5)
    gpt2 = hf.GPT2Config(
        **words, n_embd=16, n_layer=2, n_head=2, n_positions=12, bos_token_id=0, eos_token_id=0
    )
    qwen = hf.Qwen3Config(
        **common, **mlp, **words, head_dim=8, num_key_value_heads=1, tie_word_embeddings=False
    )
    style = dataclasses.replace(STYLES["qwen3"], kv_heads=1, head_width=8, rotary=1e4)
    images = {"pixel_values": IMAGES.transpose(0, 3, 1, 2)}
    text = {"input_ids": TOKENS}
    padded = {"input_ids": PADDED, "attention_mask": PADDED != 0}
    encoder = Transformer(
        5, "encoder", 20, **SIZES, hidden=32, style="bert", length=12, padding=0, types=True
    )
    return {
        "vit": (hf.ViTForImageClassification(vit), ViT(5, 4, 16, 2, 2, 32), IMAGES, images),
        "dinov2": (hf.Dinov2Model(dino), ViT(16, 4, 16, 2, 2, 32, style="dinov2"), IMAGES, images),
        "dinov3": (
            hf.DINOv3ViTModel(dino3),
            ViT(16, 4, 16, 2, 2, 32, style=of_dino3),
            IMAGES,
            images,
        ),
        "dinov3-gated": (
            hf.DINOv3ViTModel(dino3_gated),
            ViT(16, 4, 16, 2, 2, 32, style=of_gated),
            wide,
            wide_inputs,
        ),
        "bert": (hf.BertForSequenceClassification(bert), encoder, PADDED, padded),
        "gpt2": (
            hf.GPT2LMHeadModel(gpt2),
            Transformer(20, **SIZES, length=12, tied=True),
            TOKENS,
            text,
        ),
        "qwen3": (
            hf.Qwen3ForCausalLM(qwen),
            Transformer(20, **SIZES, hidden=32, style=style),
            TOKENS,
            text,
        ),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", ["vit", "dinov2", "dinov3", "dinov3-gated", "bert", "gpt2", "qwen3"]
)
def test_outputs_are_those_of_the_published_network(layout, tmp_path):
    """The reference's own implementation, with random weights that it saves itself: pip install transformers torch."""
    torch = pytest.importorskip("torch")
    hf = pytest.importorskip("transformers")
    reference, module, x, inputs = configurations(hf)[layout]
    with torch.no_grad():
        for leaf in reference.parameters():
            leaf.copy_(torch.randn_like(leaf) / leaf.shape[-1] ** 0.5)
        outputs = reference.eval()(**{name: torch.tensor(value) for name, value in inputs.items()})
    reference.save_pretrained(tmp_path)
    trainable = "^norm/" if layout == "gpt2" else "head"
    model = loaded(module, x, tmp_path / "model.safetensors", layout.partition("-")[0], trainable)
    params = model.init(jax.random.key(0))
    if layout.startswith("dinov"):  # it has no head: the class token's features
        expected = outputs.last_hidden_state[:, 0]
        params["head"]["kernel"] = jnp.eye(16)
    else:
        expected = outputs.logits
    np.testing.assert_allclose(
        model.apply(params, jnp.asarray(x)), expected.numpy(), rtol=1e-4, atol=1e-5
    )
