// Geometry of a convolution or pooling layer.
#pragma once

// The layer maps (N, height, width, channels) to (N, out_height, out_width, filters). Its windows
// have r × s pixels and strides (stride_h, stride_w). The first window begins pad_top rows above
// the map and pad_left columns to the left of it. Pixels of a window are dilation_h rows and
// dilation_w columns from each other; kernels that ignore it have a dilation of 1.
struct Geometry {
    int height, width, channels, out_height, out_width, filters, r, s, stride_h, stride_w, pad_top,
        pad_left, dilation_h, dilation_w;
};

#define GEOMETRY_PARAMETERS                                                                        \
    int height, int width, int channels, int out_height, int out_width, int filters, int r, int s, \
        int stride_h, int stride_w, int pad_top, int pad_left, int dilation_h, int dilation_w

// If a kernel is compiled for one layer, the geometry consists of constants, and the compiler
// replaces divisions by multiplications.
#ifdef FIXED_HEIGHT
#define GEOMETRY_ARGUMENTS                                                                        \
    {FIXED_HEIGHT, FIXED_WIDTH, FIXED_CHANNELS, FIXED_OUT_HEIGHT, FIXED_OUT_WIDTH, FIXED_FILTERS, \
     FIXED_R,      FIXED_S,     FIXED_STRIDE_H, FIXED_STRIDE_W,   FIXED_PAD_TOP,   FIXED_PAD_LEFT, \
     FIXED_DILATION_H, FIXED_DILATION_W}
#else
#define GEOMETRY_ARGUMENTS                                    \
    {height, width, channels, out_height, out_width, filters, \
     r,      s,     stride_h, stride_w,   pad_top,   pad_left, \
     dilation_h, dilation_w}
#endif
