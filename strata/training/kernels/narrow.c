/* 2d convolution of several narrow networks side by side, batch innermost.
 *
 *   input   [networks][in][height][width][batch]     weights [networks][out][in][kernel_h][kernel_w]
 *   output  [networks][out][out_h][out_w][batch]     batch: a multiple of LANES
 *
 * Libraries put channels innermost and fill a vector register with 16 of them; a network with 2 channels then wastes
 * seven eighths of every multiplication. Here a register holds 16 samples (8 without AVX-512) of one channel and one
 * position, and a weight is a scalar. Every sum is taken in a fixed order: the same input gives the same bits.
 */
#include <stdlib.h>
#include <string.h>

#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif
#define COLUMNS 32 /* of a row at a time: their sums stay in the nearest cache */
#define INLINE static inline __attribute__((always_inline))
typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

int narrow_lanes(void) { return LANES; }

struct shape {
    int networks, in, height, width, out, out_h, out_w, batch, kernel_h, kernel_w, stride, padding;
};

INLINE int at_most(int a, int b) { return a < b ? a : b; }
INLINE int at_least(int a, int b) { return a > b ? a : b; }
INLINE lanes at(const float *line, long column, int batch) { return *(const lanes *)(line + column * batch); }

/* Which position of the source a position of the result meets through this tap, or -1. Backwards: the gradient of an
 * input gets the gradient of the output that the input took part in through the tap. */
INLINE int source_of(int backwards, int position, int tap, int stride, int padding, int size) {
    int found = backwards ? position + padding - tap : position * stride - padding + tap;
    if (backwards) {
        if (found < 0 || found % stride) return -1;
        found /= stride;
    }
    return found >= 0 && found < size ? found : -1;
}

/* `channels` channels (a constant where this is inlined) of `columns` columns of one row of the result. */
INLINE void row_part(int backwards, int channels, float *result, const float *source, const float *weights,
                     const struct shape *s, int row, int first, int columns, int sources, int source_h, int source_w,
                     int result_plane, int weight_channel, int weight_source)
{
    lanes sums[channels][COLUMNS];
    int batch = s->batch, end = first + columns;
    for (int c = 0; c < channels; c++)
        for (int p = 0; p < columns; p++) sums[c][p] = (lanes){0};
    for (int i = 0; i < sources; i++)
        for (int kh = 0; kh < s->kernel_h; kh++) {
            int h = source_of(backwards, row, kh, s->stride, s->padding, source_h);
            if (h < 0) continue;
            const float *line = source + (long)(i * source_h + h) * source_w * batch;
            const float *taps = weights + (long)i * weight_source + kh * s->kernel_w;
            int inner = end, inner_end = end; /* columns that meet all three taps of the usual kernel */
            if (s->kernel_w == 3 && s->stride == 1) {
                int left = backwards ? s->padding - 2 : -s->padding;
                inner = at_most(end, at_least(first, -left));
                inner_end = at_least(inner, at_most(end, source_w - 2 - left));
                for (int p = inner; p < inner_end; p++) {
                    lanes x0 = at(line, p + left, batch), x1 = at(line, p + left + 1, batch),
                          x2 = at(line, p + left + 2, batch);
                    for (int c = 0; c < channels; c++) {
                        const float *w = taps + (long)c * weight_channel;
                        sums[c][p - first] += backwards ? x2 * w[0] + x1 * w[1] + x0 * w[2]
                                                        : x0 * w[0] + x1 * w[1] + x2 * w[2];
                    }
                }
            }
            for (int p = first; p < end; p++) {
                if (p == inner) p = inner_end;
                if (p >= end) break;
                for (int kw = 0; kw < s->kernel_w; kw++) {
                    int w = source_of(backwards, p, kw, s->stride, s->padding, source_w);
                    if (w < 0) continue;
                    lanes x = at(line, w, batch);
                    for (int c = 0; c < channels; c++) sums[c][p - first] += x * taps[(long)c * weight_channel + kw];
                }
            }
        }
    for (int c = 0; c < channels; c++)
        for (int p = 0; p < columns; p++)
            *(lanes *)(result + (long)c * result_plane + (long)(first + p) * batch) = sums[c][p];
}

INLINE void apply(int backwards, float *results, const float *sources, const float *weights, const struct shape *s) {
    int source_count = backwards ? s->out : s->in, result_count = backwards ? s->in : s->out;
    int source_h = backwards ? s->out_h : s->height, source_w = backwards ? s->out_w : s->width;
    int result_h = backwards ? s->height : s->out_h, result_w = backwards ? s->width : s->out_w;
    int taps = s->kernel_h * s->kernel_w;
    int weight_channel = backwards ? taps : s->in * taps, weight_source = backwards ? s->in * taps : taps;
    int plane = result_h * result_w * s->batch;
    for (int n = 0; n < s->networks; n++)
        for (int row = 0; row < result_h; row++)
            for (int b = 0; b < s->batch; b += LANES)
                for (int c = 0, width; c < result_count; c += width) {
                    int left = result_count - c;
                    width = left >= 4 ? 4 : left >= 2 ? 2 : 1;
                    const float *source = sources + (long)n * source_count * source_h * source_w * s->batch + b;
                    const float *weight = weights + (long)n * s->out * s->in * taps + (long)c * weight_channel;
                    float *result = results + (long)(n * result_count + c) * plane + (long)row * result_w * s->batch + b;
                    for (int first = 0; first < result_w; first += COLUMNS) {
                        int columns = at_most(COLUMNS, result_w - first);
#define ROW_PART(CHANNELS) \
    row_part(backwards, CHANNELS, result, source, weight, s, row, first, columns, source_count, source_h, source_w, \
             plane, weight_channel, weight_source)
                        if (width == 4) ROW_PART(4);
                        else if (width == 2) ROW_PART(2);
                        else ROW_PART(1);
                    }
                }
}

int forward(float *output, const float *input, const float *weights, const struct shape *s) {
    apply(0, output, input, weights, s);
    return 1;
}

int input_gradient(float *input, const float *output, const float *weights, const struct shape *s) {
    apply(1, input, output, weights, s);
    return 1;
}

/* What one row of the output adds to the gradients of `channels` x `taps` weights (constants where this is inlined) of
 * one row of the kernel. */
INLINE void weight_part(int channels, int taps, lanes *gradient, const float *above, const float *line,
                        const struct shape *s, int kw, int channel_stride)
{
    lanes sums[channels][taps];
    int batch = s->batch, stride = s->stride, left = kw - s->padding;
    long plane = (long)s->out_h * s->out_w * batch;
    int inner = at_most(s->out_w, at_least(0, (-left + stride - 1) / stride)); /* columns that meet every tap */
    int inner_end = s->width - taps - left < 0 ? 0 : at_most(s->out_w, (s->width - taps - left) / stride + 1);
    for (int c = 0; c < channels; c++)
        for (int t = 0; t < taps; t++) sums[c][t] = gradient[(long)c * channel_stride + t];
    for (int column = inner; column < inner_end; column++)
        for (int b = 0; b < batch; b += LANES) {
            const float *found = line + (long)(column * stride + left) * batch + b;
            lanes x[taps];
            for (int t = 0; t < taps; t++) x[t] = at(found, t, batch);
            for (int c = 0; c < channels; c++) {
                lanes y = at(above + c * plane + b, column, batch);
                for (int t = 0; t < taps; t++) sums[c][t] += y * x[t];
            }
        }
    for (int c = 0; c < channels; c++)
        for (int t = 0; t < taps; t++) gradient[(long)c * channel_stride + t] = sums[c][t];
    for (int column = 0; column < s->out_w; column++) {
        if (column >= inner && column < inner_end) continue;
        for (int t = at_least(0, -(column * stride + left)); t < taps && column * stride + left + t < s->width; t++)
            for (int c = 0; c < channels; c++)
                for (int b = 0; b < batch; b += LANES)
                    gradient[(long)c * channel_stride + t] += at(above + c * plane + b, column, batch)
                        * at(line + b, column * stride + left + t, batch);
    }
}

/* Row by row, so that what a row needs stays in the nearest cache. Returns 0 where memory for the sums is lacking. */
int weight_gradient(float *gradients, const float *outputs, const float *inputs, const struct shape *s) {
    int taps = s->kernel_h * s->kernel_w;
    long count = (long)s->out * s->in * taps;
    long in_plane = (long)s->height * s->width * s->batch, out_plane = (long)s->out_h * s->out_w * s->batch;
    lanes *sums = aligned_alloc(4 * LANES, count * sizeof(lanes));
    if (!sums) return 0;
    for (int n = 0; n < s->networks; n++) {
        memset(sums, 0, count * sizeof(lanes));
        for (int row = 0; row < s->out_h; row++)
            for (int c = 0, width; c < s->out; c += width) {
                int rest = s->out - c;
                width = rest >= 4 ? 4 : rest >= 2 ? 2 : 1;
                const float *above = outputs + (n * s->out + c) * out_plane + (long)row * s->out_w * s->batch;
                for (int i = 0; i < s->in; i++)
                    for (int kh = 0; kh < s->kernel_h; kh++) {
                        int h = source_of(0, row, kh, s->stride, s->padding, s->height);
                        if (h < 0) continue;
                        const float *line = inputs + (n * s->in + i) * in_plane + (long)h * s->width * s->batch;
                        lanes *to = sums + ((long)c * s->in + i) * taps + kh * s->kernel_w;
                        for (int kw = 0, many; kw < s->kernel_w; kw += many, to += many) {
                            many = s->kernel_w - kw >= 3 ? 3 : 1;
#define WEIGHT_PART(CHANNELS, TAPS) weight_part(CHANNELS, TAPS, to, above, line, s, kw, s->in * taps)
                            if (width == 4) { if (many == 3) WEIGHT_PART(4, 3); else WEIGHT_PART(4, 1); }
                            else if (width == 2) { if (many == 3) WEIGHT_PART(2, 3); else WEIGHT_PART(2, 1); }
                            else { if (many == 3) WEIGHT_PART(1, 3); else WEIGHT_PART(1, 1); }
                        }
                    }
            }
        for (long k = 0; k < count; k++) {
            float sum = 0;
            for (int l = 0; l < LANES; l++) sum += sums[k][l];
            gradients[n * count + k] = sum;
        }
    }
    free(sums);
    return 1;
}
