// Where the columns of a product over pixels lie in the maps, and its rows among filters; see
// implicit_gemm_mainloop.cuh and implicit_gemm.cuh.
//
// A *segment* is what one instruction has as columns: PIXEL_TILE_LINES lines of the map, either in a PIXEL_TILE_STRIP of
// eight columns, eights one below the other, or as they follow each other in the window, where
// columns between them are computed in vain. Four warps have PIXEL_TILES of them.

#pragma once

// Four warps are a team. WARP_GROUPS of a block have segments of their own; K_WARP_GROUPS teams have the same
// ones and share the sum. CHANNEL_CHUNKS of the channels come one after the other. With PERSISTENT blocks go
// from tile to tile, ask for windows before they need them, and have weights in shared memory:
// PERSISTENT_GROUPS, each with tiles and windows of its own as else a block, have them together, all of them,
// or WEIGHT_STAGES stages of STAGE_STEPS steps, which come again and again.
#ifndef MMA_N
#define MMA_N 32
#define PIXEL_TILE_LINES 4
#define PIXEL_TILE_STRIP 1
#define PIXEL_TILES 1
#define WARP_GROUPS 1
#define K_WARP_GROUPS 1
#define CHANNEL_CHUNKS 1
#define POOLED 0  // Whether windows of two by two outputs are pooled; what is in none is left out.
#define LINES_IN_M 1  // Output lines that are rows of A: two where there are only 32 filters.
#define PERSISTENT 0
#define PERSISTENT_GROUPS 0
#define WEIGHT_STAGES 0
#define STAGE_STEPS 2   // Steps that are started together; else, while words of A for as many come.
#define SLAB_PACKS 2    // Runs of a pixel side by side.
#define SLAB_PIXELS 32  // Of a slab.
#define CROPPED_WIDTH \
    0                  // Columns of narrow windows, which PIXEL_TILES strips side by side look at.
#define TENSOR_MAPS 0  // Tensor maps by which windows come, or what they are made of.
#define HALO_BYTES 1024  // Of all windows of a holder.
#define MIN_BLOCKS 1
#endif

#define TILE_M (64 * WARP_GROUPS * K_WARP_GROUPS)
#define TILE_N 16
#define WARP_M 16
#define WARP_N 16
#define TILE_K_WORDS 16

#include "halo_tile.cuh"

constexpr int WARP_GROUP_THREADS = 128, MMA_M = 64;  // Threads; rows of A.
constexpr int ALL_THREADS = THREADS * (PERSISTENT_GROUPS ? PERSISTENT_GROUPS : 1);
constexpr int N8_TILES = MMA_N / 8;  // Of columns, of a segment.
constexpr int N8_ACROSS =
    N8_TILES / PIXEL_TILE_LINES;  // Of them side by side, where lines begin with one.

// Where a segment begins; `line` counts LINES_IN_M output lines.
struct PixelTile {
    int sample, line, column;
};

// The segments of a map.
struct PixelTileMap {
    int lines, width;  // What they have to cover.
    int across, each;  // Side by side, and of a sample.

    __device__ explicit PixelTileMap(const View& view) {
        const int height = POOLED ? view.out_height / 2 * 2 : view.out_height;
        lines = (height + LINES_IN_M - 1) / LINES_IN_M;
        width = POOLED ? view.out_width / 2 * 2 : view.out_width;
        across = PIXEL_TILE_STRIP ? (width + 7) / 8 : 1;
        each = across * ((lines + PIXEL_TILE_LINES - 1) / PIXEL_TILE_LINES);
    }
    __device__ PixelTile operator()(int i) const {
        return {i / each, i % each / across * PIXEL_TILE_LINES, i % each % across * 8};
    }
};

// Which filter a row of A belongs to, and which of LINES_IN_M lines. A lane has rows g and g + 8 of its
// warp's sixteen: two filters, side by side in memory; or, where two lines are to MEET in a window
// of pooling, both lines of one.
template <int LINES, bool BOTH_LINES> struct Rows {
    static constexpr int FILTERS = MMA_M / LINES;            // Of a tile.
    static constexpr int LANE_FILTERS = BOTH_LINES ? 1 : 2;  // Of a lane.

    static __device__ int filter(int row) {
        const int warp = row / 16, g = row % 8, upper = row % 16 / 8;
        return BOTH_LINES ? warp * 8 + g : (warp * 16 + g * 2 + upper) % FILTERS;
    }
    static __device__ int line(int row) { return BOTH_LINES ? row % 16 / 8 : row / FILTERS; }
};
using TileRows = Rows<LINES_IN_M, POOLED && LINES_IN_M == 2>;

// Eights of columns that are given together: with POOLED, those of a window's lines.
constexpr int EPILOGUE_UNITS = POOLED && LINES_IN_M == 1 ? N8_TILES / 2 : N8_TILES;
__device__ inline int epilogue_unit_of(int g) {
    return EPILOGUE_UNITS == N8_TILES ? g : g / (2 * N8_ACROSS) * N8_ACROSS + g % N8_ACROSS;
}

// The first of the lane's rows of A, and its filter.
__device__ inline int row_of_lane() {
    return threadIdx.x % WARP_GROUP_THREADS / 32 * 16 + threadIdx.x % 32 / 4;
}
__device__ inline int filter_of_lane() {
    return blockIdx.y * TileRows::FILTERS + TileRows::filter(row_of_lane());
}

#if POOLED
// The lane's window of unit u of the segment that begins at `at`.
struct PoolingUnit {
    static constexpr int HEIGHT = 2 / LINES_IN_M;  // Of a window, in lines of segments.

    int number;   // Of a sample's.
    bool inside;  // The map.

    __device__ PoolingUnit(const PixelTileMap& pixel_tiles, const PixelTile& at, int u) {
        const int y = at.line + u / N8_ACROSS * HEIGHT;
        const int x = at.column + u % N8_ACROSS * 8 + threadIdx.x % 4 * 2;
        number = y / HEIGHT * (pixel_tiles.width / 2) + x / 2;
        inside = y < pixel_tiles.lines && x < pixel_tiles.width;
    }
    // Of a sample.
    static __device__ int count(const PixelTileMap& pixel_tiles) {
        return pixel_tiles.lines / HEIGHT * (pixel_tiles.width / 2);
    }
};
#endif
