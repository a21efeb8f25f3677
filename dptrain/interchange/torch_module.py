"""A trained network as a Python module for PyTorch, and its parameters as a safetensors file.

The module imports PyTorch and safetensors, and nothing of dptrain. Its class has the layers as
attributes, with the names of dptrain, so that its ``state_dict`` has the names of the file.
"""

from __future__ import annotations

import keyword
import pprint
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from dptrain import __version__
from dptrain.errors import UserError
from dptrain.files import write_whole
from dptrain.interchange.contents import ModelContents
from dptrain.interchange.raw_inputs import RawInputs
from dptrain.interchange.safetensors_files import write_arrays
from dptrain.interchange.torch_layers import Code, code_of
from dptrain.network.network import INPUT, Network

Numbers = float | tuple[float, ...]

_NAMES = """
T_destination add_module apply bfloat16 buffers call_super_init children compile cpu cuda double
dump_patches eval extra_repr float forward get_buffer get_extra_state get_parameter
get_submodule half ipu load_state_dict modules mtia named_buffers named_children named_modules
named_parameters parameters predict preprocess register_backward_hook register_buffer
register_forward_hook register_forward_pre_hook register_full_backward_hook
register_full_backward_pre_hook register_load_state_dict_post_hook
register_load_state_dict_pre_hook register_module register_parameter
register_state_dict_post_hook register_state_dict_pre_hook requires_grad_ set_extra_state
set_submodule share_memory state_dict to to_empty train training type xpu zero_grad
"""

RESERVED = frozenset(_NAMES.split())
"""Attributes of PyTorch's modules and of the generated class, which no layer can have as name."""

MODULE_NAMES = ("F", "Path", "Scope", "Tensor", "nn", "self", "torch", "x")
"""Names that the generated module uses itself."""

SCOPE = '''
class Scope(nn.Module):
    """Layers whose names begin with the same part; `scope["0"]` is the part called 0."""

    def __getitem__(self, name: str) -> nn.Module:
        return self.get_submodule(name)
'''

RESIZE = '''
def bilinear_weights(source: int, target: int) -> Tensor:
    """Return the matrix (target, source) that resizes an axis, with antialiasing."""
    scale = source / target
    centres = (torch.arange(target, dtype=torch.float64) + 0.5) * scale
    pixels = torch.arange(source, dtype=torch.float64) + 0.5
    weights = (1.0 - (pixels - centres[:, None]).abs() / max(scale, 1.0)).clamp(min=0.0)
    return (weights / weights.sum(1, keepdim=True)).float()


def resize(x: Tensor, height: int, width: int) -> Tensor:
    """Return images (N, C, H, W) in another size."""
    rows = bilinear_weights(x.shape[2], height).to(x.device)
    columns = bilinear_weights(x.shape[3], width).to(x.device)
    return rows @ x @ columns.T
'''

MAPS = '''
def interpolation_weights(positions: Tensor, height: int, width: int) -> Tensor:
    """Return the weights (sensors, height * width) of sensors (sensors, 2) in a map of them."""
    left, bottom = positions.amin(0).tolist()
    right, top = positions.amax(0).tolist()
    rows = torch.linspace(top, bottom, height, dtype=torch.float64)
    columns = torch.linspace(left, right, width, dtype=torch.float64)
    across = columns[None, None, :] - positions[:, 0, None, None]
    up = rows[None, :, None] - positions[:, 1, None, None]
    squares = (across**2 + up**2).flatten(1)
    ratios = torch.where(squares > 0, squares.amin(0) / squares, 1.0)
    return (ratios / ratios.sum(0)).float()
'''

LOAD = '''
def load(path: str | Path = WEIGHTS) -> {name}:
    """Return the trained network in evaluation mode."""
    model = {name}()
    missing, additional = model.load_state_dict(load_file(path), strict=False)
    missing = [key for key in missing if not key.endswith("num_batches_tracked")]
    if missing or additional:
        raise ValueError(f"{{path}} lacks {{missing}}, and has {{additional}} in addition")
    return model.eval()
'''


def write_module(contents: ModelContents, path: Path) -> tuple[Path, ...]:
    """Write a Python module and, next to it, a safetensors file with its parameters.

    Args:
        contents: the trained network.
        path: the module.

    Returns:
        The module and the file of the parameters.

    Raises:
        UserError: PyTorch cannot have the names of the layers, or a file cannot be written.
    """
    weights = weights_path(path)
    text = module_text(contents)
    metadata = {"format": "pt", **contents.metadata()}
    write_arrays(contents.arrays, weights, metadata, flag="--output")
    write_whole(path, text, "--output")
    return path, weights


def weights_path(path: Path) -> Path:
    """Return the path of the parameters of a module."""
    return path.with_suffix(".safetensors")


def module_text(contents: ModelContents) -> str:
    """Return the text of the Python module.

    Raises:
        UserError: PyTorch cannot have the names of the layers.
    """
    network, raw = contents.network, RawInputs.of(contents.preprocessing)
    codes = [code_of(node) for node in network.nodes]
    modules = {
        node.name: code.module
        for node, code in zip(network.nodes, codes, strict=True)
        if code.module
    }
    _check_names(modules)
    has_scopes = any("." in name or not _is_identifier(name) for name in modules)
    name = _class_name(network.name)
    outputs = contents.preprocessing.output_names(network)
    sections = [
        _header(contents),
        f"OUTPUTS = {_formatted(outputs)}\n"
        f'"""Names of the outputs, in their order."""\n\n'
        f'WEIGHTS = Path(__file__).with_suffix(".safetensors")\n'
        f'"""Parameters and running statistics."""\n',
        RESIZE if raw.resize is not None else "",
        MAPS if raw.positions else "",
        SCOPE if has_scopes else "",
        _class(contents, raw, name, modules, codes, "Scope" if has_scopes else "nn.Module"),
        LOAD.format(name=name),
    ]
    return "\n\n".join(section.strip("\n") + "\n" for section in sections if section)


def _header(contents: ModelContents) -> str:
    uses_functions = any("F." in code_of(node).expression for node in contents.network.nodes)
    return f'''"""Network {_text(contents.network.name)}, exported by dptrain {__version__}.

Data: {_text(contents.data)}. Seed: {contents.seed}. Step: {contents.step}.

`load().predict(samples)` returns what `dptrain predict` writes. `samples` are raw, as the training
data stores them; `forward` computes on converted samples.
"""

from __future__ import annotations

from pathlib import Path

import torch
{"import torch.nn.functional as F" if uses_functions else ""}
from safetensors.torch import load_file
from torch import Tensor, nn
'''.replace("import torch\n\n", "import torch\n")


def _class(
    contents: ModelContents,
    raw: RawInputs,
    name: str,
    modules: dict[str, str],
    codes: Sequence[Code],
    base: str,
) -> str:
    """Return the class of the network."""
    network = contents.network
    inputs, outputs = _times(("N", *network.input_shape)), _times(("N", *network.output_shape))
    stored = _times(("N", *(size or axis for size, axis in zip(raw.shape, "CHW", strict=False))))
    methods = {
        "def __init__(self) -> None:": ["super().__init__()", *_constructors(modules)],
        "def forward(self, x: Tensor) -> Tensor:": [
            f'"""Return the outputs before the loss, {outputs}, of converted samples {inputs}."""',
            *_forward(network, codes),
        ],
        "@staticmethod\ndef preprocess(samples: object) -> Tensor:": [
            f'"""Convert raw samples, {raw.dtype} {stored}, to inputs {inputs}."""',
            *_preprocessing(raw),
        ],
        "@torch.no_grad()\ndef predict(self, samples: object) -> Tensor:": [
            f'"""Return {_PREDICTED[network.loss.targets]}, {outputs}, for raw samples."""',
            *_prediction(contents),
        ],
    }
    body = [
        f"{head}\n{textwrap.indent(chr(10).join(lines), '    ')}" for head, lines in methods.items()
    ]
    head = f'class {name}({base}):\n    """The network."""\n\n'
    return head + textwrap.indent("\n\n".join(body), "    ")


_PREDICTED = {"classes": "probabilities", "binary": "probabilities", "values": "values"}


def _constructors(modules: dict[str, str]) -> Iterator[str]:
    """Yield the statements that construct the modules, after those of their scopes."""
    known = set[str]()
    for name, module in modules.items():
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            prefix = ".".join(parts[:count])
            if prefix not in known:
                known.add(prefix)
                yield _assignment(parts[:count], module if count == len(parts) else "Scope()")


def _assignment(parts: Sequence[str], value: str) -> str:
    if _is_identifier(parts[-1]):
        return f"{_reference(parts)} = {value}"
    return f'{_reference(parts[:-1])}.add_module("{parts[-1]}", {value})'


def _reference(parts: Sequence[str]) -> str:
    """Return the expression of a module: ``self.layer1["0"].conv1``."""
    return "self" + "".join(f".{part}" if _is_identifier(part) else f'["{part}"]' for part in parts)


def _forward(network: Network, codes: Sequence[Code]) -> Iterator[str]:
    """Yield the statements of the forward pass.

    The variable x holds tensors that only the next layer reads; others have the name of the layer.
    """
    readers: dict[str, list[int]] = {name: [] for name in (INPUT, *(n.name for n in network.nodes))}
    for node in network.nodes:
        for name in node.inputs:
            readers[name].append(node.index)
    variables = {INPUT: "x"}
    taken = {*MODULE_NAMES}
    if set(readers[INPUT]) != {0}:
        variables[INPUT] = _variable(INPUT, taken)
        yield f"{variables[INPUT]} = x"
    for node, code in zip(network.nodes, codes, strict=True):
        is_chained = set(readers[node.name]) <= {node.index + 1}
        variables[node.name] = "x" if is_chained else _variable(node.name, taken)
        inputs = [variables[name] for name in node.inputs]
        reference = _reference(node.name.split("."))
        yield f"{variables[node.name]} = {code.expression.format(*inputs, m=reference)}"
    yield f"return {variables[network.nodes[-1].name]}"


def _variable(name: str, taken: set[str]) -> str:
    """Return an unused variable name for the output of a layer, and mark it as used."""
    variable = re.sub(r"\W", "_", name)
    while variable in taken or keyword.iskeyword(variable):
        variable += "_"
    taken.add(variable)
    return variable


def _preprocessing(raw: RawInputs) -> Iterator[str]:
    """Yield the statements that convert raw samples, in the order of `RawInputs`."""
    # A copy of arrays: PyTorch warns if it shares memory that cannot be written.
    yield "x = samples if isinstance(samples, Tensor) else torch.tensor(samples)"
    if raw.mean:
        yield "x = x.double()"
        yield f"mean = x.new_tensor({_formatted(raw.mean, 8)})"
        yield f"deviation = x.new_tensor({_formatted(raw.deviation, 8)})"
        yield "x = (x - mean) / deviation"
    if raw.crop is not None:
        height, width = raw.crop
        yield f"top, left = (x.shape[2] - {height}) // 2, (x.shape[3] - {width}) // 2"
        yield f"x = x[:, :, top : top + {height}, left : left + {width}]"
    yield "x = x.float()"
    if raw.becomes_grey:
        yield "x = 0.299 * x[:, :1] + 0.587 * x[:, 1:2] + 0.114 * x[:, 2:]"
    if raw.resize is not None:
        yield f"x = resize(x, {raw.resize[0]}, {raw.resize[1]})"
    yield from _scaling(raw.scale, raw.offset)
    if raw.positions:
        height, width = raw.shape_of_inputs[1:]
        yield f"positions = torch.tensor({_formatted(raw.positions, 8)}, dtype=torch.float64)"
        yield f"weights = interpolation_weights(positions.view(-1, 2), {height}, {width})"
        yield f"x = (x @ weights.to(x.device)).view(-1, {', '.join(map(str, raw.shape_of_inputs))})"
    if raw.transposes:
        yield "x = x.permute(0, 3, 1, 2)"
    if raw.repeats_channels:
        yield f"x = x.expand(-1, {raw.shape_of_inputs[0]}, -1, -1)"
    yield "return x.flatten(1)" if raw.flattens else "return x"


def _prediction(contents: ModelContents) -> Iterator[str]:
    targets, preprocessing = contents.network.loss.targets, contents.preprocessing
    expression = {"classes": "torch.softmax({}, 1)", "binary": "torch.sigmoid({})", "values": "{}"}
    yield f"x = {expression[targets].format('self(self.preprocess(samples))')}"
    yield from _scaling(preprocessing.target_scale, preprocessing.target_offset)
    yield "return x"


def _scaling(scale: Numbers, offset: Numbers) -> Iterator[str]:
    if isinstance(scale, tuple) or isinstance(offset, tuple):
        yield f"x = x * torch.tensor({scale!r}, device=x.device)"
        yield f"x = x + torch.tensor({offset!r}, device=x.device)"
        return
    if scale != 1.0:
        yield f"x = x * {scale!r}"
    if offset != 0.0:
        yield f"x = x {'-' if offset < 0 else '+'} {abs(offset)!r}"


def _check_names(modules: dict[str, str]) -> None:
    """Refuse names of layers that PyTorch's modules cannot have as attributes."""
    for name in modules:
        parts = name.split(".")
        for part in parts:
            if part in RESERVED or part.startswith("_"):
                raise UserError(
                    f"layer {name} cannot be exported to PyTorch, whose modules have an attribute "
                    f"'{part}' of their own; rename the layer, or export to .onnx"
                )
        for count in range(1, len(parts)):
            scope = ".".join(parts[:count])
            if scope in modules:
                raise UserError(
                    f"layers {scope} and {name} cannot be exported to PyTorch, because the first "
                    "has the name of a scope of the second; rename one, or export to .onnx"
                )


def _is_identifier(part: str) -> bool:
    return part.isidentifier() and not keyword.iskeyword(part)


def _class_name(name: str) -> str:
    """Return a name for the class: ``Resnet18Cifar`` for resnet18-cifar."""
    words = re.findall(r"[A-Za-z0-9]+", name)
    joined = "".join(word[0].upper() + word[1:] for word in words)
    is_free = joined.isidentifier() and joined not in (*MODULE_NAMES, "OUTPUTS", "WEIGHTS")
    return joined if is_free and not keyword.iskeyword(joined) else f"Network{joined}"


def _formatted(values: Sequence[object], indent: int = 0) -> str:
    """Return a tuple on lines of at most 100 columns, with a comma after the last value."""
    text = pprint.pformat(tuple(values), width=96 - indent, compact=True)
    if len(text) < 80 - indent:
        return text
    return f"(\n{textwrap.indent(text[1:-1].replace(chr(10) + ' ', chr(10)), '    ')},\n)"


def _times(sizes: Sequence[object]) -> str:
    return f"({', '.join(map(str, sizes))})"


def _text(value: str) -> str:
    """Return text that can stand in a docstring."""
    printable = "".join(c if c.isprintable() else "?" for c in value)
    return re.sub(r'[\\"]', "'", printable) or "unknown"
