// What kernels know of a layer that reads windows of maps.
#pragma once

// Maps (N, height, width, channels) to (N, out_height, out_width, filters) by windows of r by s,
// `down` and `across` apart; the first begins `top` above the map and `left` before it.
struct Geometry {
    int height, width, channels, out_height, out_width, filters, r, s, stride_h, stride_w, pad_top,
        pad_left;
};

#define GEOMETRY_PARAMETERS                                                                        \
    int height, int width, int channels, int out_height, int out_width, int filters, int r, int s, \
        int stride_h, int stride_w, int pad_top, int pad_left

// Compiled for one layer, kernels know it beforehand, and divide by constants.
#ifdef FIXED_HEIGHT
#define GEOMETRY_ARGUMENTS                                                                        \
    {FIXED_HEIGHT, FIXED_WIDTH, FIXED_CHANNELS, FIXED_OUT_HEIGHT, FIXED_OUT_WIDTH, FIXED_FILTERS, \
     FIXED_R,      FIXED_S,     FIXED_STRIDE_H, FIXED_STRIDE_W,   FIXED_PAD_TOP,   FIXED_PAD_LEFT}
#else
#define GEOMETRY_ARGUMENTS                                    \
    {height, width, channels, out_height, out_width, filters, \
     r,      s,     stride_h, stride_w,   pad_top,   pad_left}
#endif
