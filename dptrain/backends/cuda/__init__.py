"""Training on an NVIDIA GPU with the project's own kernels, through CuPy.

A layer reaches its kernel through these modules, in this order:

1. `backend`: selects the operation of a group of layers and binds the loss and the optimizer.
2. `operation`, `pooling`, `normalization`, `dropout`: layers without weights. `epilogues`: layers
   that follow a convolution and its ReLU in the same group.
3. `convolution` and `dense`: layers with weights. The tables in `algorithms` list the algorithms of
   their products: `gather_convolution`, `halo_convolution`, `wgmma_convolution` and those of few
   channels. `weighted`: binds the products. `wgmma_operands`: operands in the order of TMA copies.
4. `implicit_gemm_cost` (from `implicit_gemm_candidates` and `implicit_gemm_tiles`), `wgrad_tiles`,
   `few_channel_tiles`, `few_channel_wgrad_tiles`, `skinny_gemm`, `wgmma_gemm_tiles`,
   `wgmma_convolution_tiles`, `gemm_tiles`: estimate the times of tile configurations. `halo_tiles`,
   `patch_grids`, `geometry` and `hardware`: the shape of the layer and the limits of the GPU.
5. `replica`, `launching`: bind and launch the stages of a step.
6. `device` (interface), `gpu`: memory, streams, graphs and launches (`dependent_launch`,
   `tensor_maps`). `nvrtc`: compiles a ``.cu`` file, which `sources` finds by its name, with the
   macros of the configuration.
"""

from dptrain.backends.cuda.backend import CudaBackend


def create() -> CudaBackend:
    """Return the backend."""
    return CudaBackend()
