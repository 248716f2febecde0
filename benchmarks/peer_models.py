"""The peers' models, made from the same GGUF file: a dequantised checkpoint, and what each peer builds of it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

GENAI_PRECISIONS = ("fp32", "int4")


def export_checkpoint(gguf: Path, folder: Path) -> Path:
    """Write the GGUF file's weights as a float32 `transformers` directory, once."""
    if (folder / "config.json").exists():
        return folder
    from safetensors.torch import save_file

    from dsc.compiler.gguf_import import read_gguf

    model = read_gguf(gguf)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for name, content in model.tokenizer.items():
        (folder / name).write_bytes(content)
    config = model.config.to_dict() | {"architectures": ["LlamaForCausalLM"], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config, indent=1))  # last: it says that the rest is there
    return folder


def build_genai(python: Path, checkpoint: Path, folder: Path, precision: str) -> Path:
    """Run onnxruntime-genai's own model builder on the checkpoint, once.

    Raises:
        RuntimeError: the builder failed; the end of its output is the message.
    """
    if (folder / "genai_config.json").exists():
        return folder
    command = [str(python), "-m", "onnxruntime_genai.models.builder", "-m", str(checkpoint), "-i", str(checkpoint)]
    command += ["-o", str(folder), "-c", str(folder / "cache"), "-p", precision, "-e", "cpu"]
    if precision == "int4":
        command += ["--extra_options", "int4_accuracy_level=4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip()[-400:])
    return folder
