// Tile configuration of implicit GEMM on halo tiles: which pixels are the columns of C and which
// filters are its rows. The macros are set by implicit_gemm_tiles.py.
//
// A *pixel tile* is the N dimension of one MMA instruction: MMA_N pixels in PIXEL_TILE_LINES lines
// of the map. Either it is a strip of eight columns (PIXEL_TILE_STRIP), in groups of eight pixels
// below each other, or it consists of consecutive pixels of the halo tile; then the padding between
// two lines is computed as well and discarded. A warp group multiplies PIXEL_TILES of them.
//
// A *work tile* is what one warp group computes at a time: 64 rows × PIXEL_TILES pixel tiles.

#pragma once

// A block has WARP_GROUPS warp groups (four warps each) with different work tiles, and for
// intra-block split-K K_WARP_GROUPS times as many, which share work tiles and divide the sum. The
// channels are processed in CHANNEL_CHUNKS chunks. With PERSISTENT, PERSISTENT_GROUPS groups of
// threads with work tiles and halo tiles of their own share the weights in shared memory: all
// weights, or a ring of WEIGHT_STAGES stages of STAGE_STEPS steps.
#ifndef MMA_N
#define MMA_N 32
#define PIXEL_TILE_LINES 4
#define PIXEL_TILE_STRIP 1
#define PIXEL_TILES 1
#define WARP_GROUPS 1
#define K_WARP_GROUPS 1
#define CHANNEL_CHUNKS 1
#define POOLED 0      // 1 if the epilogue pools 2 × 2 windows; pixels in no window are left out.
#define LINES_IN_M 1  // Output lines in the M dimension: several if there are few filters.
#define PERSISTENT 0
#define PERSISTENT_GROUPS 0
#define WEIGHT_STAGES 0
#define STAGE_STEPS 2    // MMA steps per commit group, or per prefetch of weights into registers.
#define SLAB_PACKS 2     // Adjacent packs of a pixel (halo_tile.cuh).
#define SLAB_PIXELS 32   // Pixels of a slab.
#define CROPPED_WIDTH 0  // Width of cropped halo tiles, or 0.
#define TENSOR_MAPS 0    // Number of tensor maps for TMA; 0 without TMA.
#define HALO_BYTES 1024  // Bytes of all halo tiles of a group.
#define MIN_BLOCKS 1
#endif

#define TILE_M (64 * WARP_GROUPS * K_WARP_GROUPS)
#define TILE_N 16
#define WARP_M 16
#define WARP_N 16
#define TILE_K_WORDS 16

#include "halo_tile.cuh"

// Threads of a warp group; rows of A per warp group.
constexpr int WARP_GROUP_THREADS = 128, MMA_M = 64;
constexpr int ALL_THREADS = THREADS * (PERSISTENT_GROUPS ? PERSISTENT_GROUPS : 1);
constexpr int N8_TILES = MMA_N / 8;                     // Groups of eight columns of a pixel tile.
constexpr int N8_ACROSS = N8_TILES / PIXEL_TILE_LINES;  // Groups of eight columns per line.

static_assert(!POOLED || ROW_SAMPLES == 1, "pooling reads adjacent pixels");

// Position of a pixel tile; `line` counts units of LINES_IN_M output lines. If samples alternate in
// a row, `sample` is the group of samples, and `column` counts the pixels of all of them.
struct PixelTile {
    int sample, line, column;
};

// The pixel tiles of a map.
struct PixelTileMap {
    int lines, width;  // Lines and columns that the pixel tiles cover.
    int across, each;  // Pixel tiles next to each other, and per sample.

    __device__ explicit PixelTileMap(const View& view) {
        const int height = POOLED ? view.out_height / 2 * 2 : view.out_height;
        lines = (height + LINES_IN_M - 1) / LINES_IN_M;
        width = POOLED ? view.out_width / 2 * 2 : view.out_width * ROW_SAMPLES;
        across = PIXEL_TILE_STRIP ? (width + 7) / 8 : 1;
        each = across * ((lines + PIXEL_TILE_LINES - 1) / PIXEL_TILE_LINES);
    }
    __device__ PixelTile operator()(int i) const {
        return {i / each, i % each / across * PIXEL_TILE_LINES, i % each % across * 8};
    }
};

// Maps a row of A to a filter and to one of LINES output lines (1, 2, 4 or 8). A lane holds rows g
// and g + 8 of its warp's sixteen. These are two filters that are adjacent in memory, or, if two
// lines form a pooling window (BOTH_LINES), both lines of one filter.
template <int LINES, bool BOTH_LINES> struct Rows {
    static constexpr int FILTERS = MMA_M / LINES;            // Filters of a work tile.
    static constexpr int LANE_FILTERS = BOTH_LINES ? 1 : 2;  // Filters of a lane.

    static __device__ int filter(int row) {
        return BOTH_LINES ? row / 16 * 8 + row % 8 : paired(row) % FILTERS;
    }
    static __device__ int line(int row) {
        // The order within sixteen rows matters only if they contain several lines.
        return BOTH_LINES ? row % 16 / 8 : (FILTERS < 16 ? paired(row) : row) / FILTERS;
    }

   private:
    // Rows g and g + 8 are adjacent in this order.
    static __device__ int paired(int row) { return row / 16 * 16 + row % 8 * 2 + row % 16 / 8; }
};
using TileRows = Rows<LINES_IN_M, POOLED && LINES_IN_M == 2>;

// Epilogue unit: groups of eight columns that are stored together. If the epilogue pools, a unit
// has the lines of a pooling window.
constexpr int EPILOGUE_UNITS = POOLED && LINES_IN_M == 1 ? N8_TILES / 2 : N8_TILES;
__device__ inline int epilogue_unit_of(int g) {
    return EPILOGUE_UNITS == N8_TILES ? g : g / (2 * N8_ACROSS) * N8_ACROSS + g % N8_ACROSS;
}

// First row of A that the lane holds, and its filter.
__device__ inline int row_of_lane() {
    return threadIdx.x % WARP_GROUP_THREADS / 32 * 16 + threadIdx.x % 32 / 4;
}
__device__ inline int filter_of_lane() {
    return blockIdx.y * TileRows::FILTERS + TileRows::filter(row_of_lane());
}

#if POOLED
// The lane's pooling window in epilogue unit u of the pixel tile at `at`.
struct PoolingUnit {
    // Lines of a pooling window, in units of LINES_IN_M output lines.
    static constexpr int HEIGHT = 2 / LINES_IN_M;

    int number;   // Index within the sample.
    bool inside;  // True if it lies inside the map.

    __device__ PoolingUnit(const PixelTileMap& pixel_tiles, const PixelTile& at, int u) {
        const int y = at.line + u / N8_ACROSS * HEIGHT;
        const int x = at.column + u % N8_ACROSS * 8 + threadIdx.x % 4 * 2;
        number = y / HEIGHT * (pixel_tiles.width / 2) + x / 2;
        inside = y < pixel_tiles.lines && x < pixel_tiles.width;
    }
    // Pooling windows of a sample.
    static __device__ int count(const PixelTileMap& pixel_tiles) {
        return pixel_tiles.lines / HEIGHT * (pixel_tiles.width / 2);
    }
};
#endif
