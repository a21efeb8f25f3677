"""Large dense layers on Hopper GPUs: products of matrices that TMA copies and wgmma multiplies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dptrain.backends.cuda.convolution.wgmma.wgmma_operands import padded_pitch, rounded_weights
from dptrain.backends.cuda.dense import wgmma_gemm_tiles
from dptrain.backends.cuda.dense.dense import DenseGemm, dense_shape, pick_config
from dptrain.backends.cuda.dense.gemm_tiles import GemmConfig, ceil_div
from dptrain.backends.cuda.dense.wgmma_gemm_tiles import WgmmaTile, step_terms
from dptrain.backends.cuda.device.device import Array, Function
from dptrain.backends.cuda.device.hardware import limits_of
from dptrain.backends.cuda.weighted import joined_maps
from dptrain.backends.replica import Context, Kernel
from dptrain.network.activations import ReLU
from dptrain.plan.lowering import Access, BufferSpec, Group, GroupNeeds, Phase, Setting

FILE = "dense_wgmma.cu"

GRADIENT_SAMPLES, GRADIENT_OUTPUTS, GRADIENT_THREADS = 32, 64, 256
"""Samples, outputs and threads of a block of ``dense_backward``."""

TiledArray = tuple[Array, tuple[int, int], tuple[int, int]]
"""An array, its shape as a matrix, and the box that one TMA copy transfers."""


class WgmmaDenseGemm(DenseGemm):
    """Dense layers with many samples and weights, optionally with ReLU and Dropout.

    The products read their operands from memory in the operand type. In bf16, forward rounds the
    weights. A separate backward phase replaces dy by dz, sums it over blocks of samples and, for
    tf32, writes it transposed as well.
    """

    @classmethod
    def config(
        cls, group: Group, setting: Setting, phase: Phase, rows: int, columns: int, terms: int
    ) -> GemmConfig:
        """Return the configuration of a product of rows × columns sums of `terms` products."""
        product = setting.precision, rows, columns, terms, limits_of(setting), phase
        return pick_config(wgmma_gemm_tiles.rank_configs(*product), group, setting, phase)

    @classmethod
    def forward_config(cls, group: Group, setting: Setting) -> GemmConfig:
        inputs, outputs = dense_shape(group)
        return cls.config(group, setting, Phase.FORWARD, setting.batch_size, outputs, inputs)

    @classmethod
    def wgrad_config(cls, group: Group, setting: Setting) -> GemmConfig:
        inputs, outputs = dense_shape(group)
        return cls.config(
            group, setting, Phase.BACKWARD_WEIGHT, inputs, outputs, setting.batch_size
        )

    @classmethod
    def backward_input_config(cls, group: Group, setting: Setting) -> GemmConfig:
        inputs, outputs = dense_shape(group)
        return cls.config(group, setting, Phase.BACKWARD_INPUT, setting.batch_size, inputs, outputs)

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        (inputs, outputs), n = dense_shape(group), setting.batch_size
        buffers, written = {}, ["y"]
        weights: tuple[str, ...] = ()
        if setting.precision == "bf16":
            buffers["rounded"] = BufferSpec((inputs, outputs), setting.activations)
            written.append("rounded")
            weights = ("rounded",)
        parts = cls.forward_config(group, setting).split_k.count
        if parts > 1:
            buffers["forward_partial"] = BufferSpec((parts, n * outputs), "float32")
            written.append("forward_partial")
        phases = {Phase.FORWARD: Access(("x",), tuple(written))}
        if not setting.training:
            return GroupNeeds(phases, buffers)
        buffers["db_partial"] = BufferSpec((ceil_div(n, GRADIENT_SAMPLES), outputs), "float32")
        dz = "dy"
        gradients = ["dy", "db_partial"]
        if setting.precision == "tf32":
            dz = "transposed"
            buffers[dz] = BufferSpec((outputs, padded_pitch(n)), "float32")
            gradients.append(dz)
        reads = ("dy", "y") if ReLU in group.kinds else ("dy",)
        phases[Phase.BACKWARD] = Access(reads, tuple(gradients))
        phases[Phase.BACKWARD_WEIGHT] = Access(("x", dz, "db_partial"))
        if group.gradients:
            phases[Phase.BACKWARD_INPUT] = Access(("dy", *weights), ("dx",))
        return GroupNeeds(phases, buffers)

    def forward(self) -> Kernel:
        a, config = self.arrays, self.forward_config(self.group, self.setting)
        inputs, outputs = dense_shape(self.group)
        split = config.split_k.count > 1
        name = "dense_forward_split_k" if split else "dense_forward"
        box = self._step, self._step
        rows = self._tile(config).columns if self._is_tf32 else self._tile(config).rows
        product = self._product(
            name, config, lambda n: (n, outputs),
            lambda n: [
                (a["x"], (n, inputs), (rows, self._step)), (self._weights, (inputs, outputs), box),
            ],
            [a["x"], self._weights, *([a["forward_partial"]] if split else [a["bias"], a["y"]])],
            *self.shape, *([np.int32(config.split_k.terms)] if split else []),
            fuses_dropout=not split,
        )  # fmt: skip
        round_weights, reduce = self._round_weights(), self.reduce_forward(config)

        def run(context: Context) -> None:
            if context.n:
                round_weights()
                product(context)
                if split:
                    reduce(context)

        return run

    def _round_weights(self) -> Callable[[], None]:
        """Return a function that enqueues the rounding of the weights; tf32 needs none."""
        if self._is_tf32:
            return lambda: None
        return rounded_weights(self, self.arrays["weight"], self.arrays["rounded"])

    def backward(self) -> Kernel:
        """Return the stage that replaces dy by dz."""
        a, outputs = self.arrays, self.shape[1]
        function = self._function(
            "dense_backward", self.wgrad_config(self.group, self.setting),
            EPILOGUE=self.undone_epilogue,
        )  # fmt: skip
        # An unused argument is any array.
        transposed = a["transposed" if self._is_tf32 else "dy"]
        args = a["dy"], a["y"], self.dropout_factor, a["dy"], transposed, a["db_partial"]

        def run(context: Context) -> None:
            if context.n:
                grid = (
                    ceil_div(context.n, GRADIENT_SAMPLES),
                    ceil_div(int(outputs), GRADIENT_OUTPUTS), 1,
                )  # fmt: skip
                numbers = np.int32(context.n), outputs, np.int32(padded_pitch(context.n))
                function(grid, (GRADIENT_THREADS, 1, 1), [*args, *numbers])

        return run

    def backward_weight(self) -> Kernel:
        a, (inputs, outputs) = self.arrays, dense_shape(self.group)
        config, box = self.wgrad_config(self.group, self.setting), (self._step, self._step)
        dz = a["transposed"] if self._is_tf32 else a["dy"]

        def matrices(n: int) -> Sequence[TiledArray]:
            terms = (dz, (n, outputs), box)
            if self._is_tf32:
                terms = dz, (outputs, padded_pitch(n)), (self._tile(config).columns, self._step)
            return (a["x"], (n, inputs), box), terms

        def trailing(n: int) -> list[np.generic]:
            return [np.int32(padded_pitch(n)), np.int32(ceil_div(n, GRADIENT_SAMPLES))]

        return self._product(
            "dense_backward_weight", config, lambda n: (inputs, outputs), matrices,
            [a["x"], dz, a["db_partial"], a["dweight"], a["dbias"]], *self.shape,
            trailing=trailing,
        )  # fmt: skip

    def backward_input(self) -> Kernel:
        a, (inputs, outputs) = self.arrays, dense_shape(self.group)
        config = self.backward_input_config(self.group, self.setting)
        tile = self._tile(config)
        product = self._product(
            "dense_backward_input", config, lambda n: (n, inputs),
            lambda n: [
                (a["dy"], (n, outputs), (tile.rows, self._step)),
                (self._weights, (inputs, outputs), (tile.columns, self._step)),
            ],
            [a["dy"], self._weights, a["dx"]], *self.shape,
        )  # fmt: skip

        def run(context: Context) -> None:
            if context.n:
                product(context)

        return run

    @property
    def _is_tf32(self) -> bool:
        return self.setting.precision == "tf32"

    @property
    def _step(self) -> int:
        return step_terms(self.setting.precision)

    @property
    def _weights(self) -> Array:
        """The weights in the type of the operands."""
        return self.arrays["weight" if self._is_tf32 else "rounded"]

    @staticmethod
    def _tile(config: GemmConfig) -> WgmmaTile:
        assert isinstance(config.tile, WgmmaTile)
        return config.tile

    def _function(self, name: str, config: GemmConfig, **defines: int) -> Function:
        return self.device.function(
            FILE, name, **{**config.tile.defines, **self.defines, "EPILOGUE": 0, **defines}
        )

    def _product(
        self,
        name: str,
        config: GemmConfig,
        shape: Callable[[int], tuple[int, int]],
        matrices: Callable[[int], Sequence[TiledArray]],
        arrays: Sequence[Array],
        *numbers: np.generic,
        trailing: Callable[[int], list[np.generic]] = lambda n: [],
        fuses_dropout: bool = False,
    ) -> Kernel:
        """Return the stage of a product.

        Args:
            name: of the kernel.
            config: tile configuration and split-K.
            shape: function from the number of samples to rows and columns of the result.
            matrices: function from the number of samples to the operands that TMA copies. Rows
                beyond the samples are read as 0.
            arrays: arguments before the number of samples.
            numbers: arguments after it.
            trailing: function from the number of samples to further arguments.
            fuses_dropout: whether the kernel applies the epilogue, which includes dropout.
        """
        tile, parts = config.tile, config.split_k.count
        defines = {}
        if fuses_dropout:
            defines = {
                "EPILOGUE": self.undone_epilogue, "EPILOGUE_DROPOUT": int(self.fuses_dropout),
            }  # fmt: skip
        last = {
            training: self.dropout_arguments(training=training) if fuses_dropout else []
            for training in (False, True)
        }
        maps: dict[int, list[np.void]] = {}

        def tensor_maps(n: int) -> list[np.void]:
            if n not in maps:
                found = [
                    self.device.tensor_map(array, shape, box, self.setting.precision)
                    for array, shape, box in matrices(max(n, 1))
                ]
                maps[n] = joined_maps([each for each in found if each is not None])
            return maps[n]

        if tensor_maps(self.batch_size):
            defines["TENSOR_MAPS"] = 2
        function = self._function(name, config, **defines)

        def run(context: Context) -> None:
            n = context.n
            function(
                tile.grid(*shape(n), parts), tile.block,
                [*tensor_maps(n), *arrays, np.int32(n), *numbers, *trailing(n),
                 *last[context.training]],
                shared_bytes=tile.shared_bytes,
            )  # fmt: skip

        return run
