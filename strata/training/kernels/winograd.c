/* 2d convolution with 3x3 kernels, stride 1 and padding 1, channels innermost, by Winograd's F(4x4, 3x3).
 *
 *   input   [batch][height][width][in]     output [batch][height][width][out]     in, out: at least LANES
 *
 * Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", 2016: 4x4 results of a tile come from 36 products
 * per pair of channels instead of 144, for some additions before and after and about one more digit of rounding.
 * TILES tiles at a time go through all three stages, so that nothing between them leaves the second cache. Every sum is
 * taken in a fixed order: the same input gives the same bits.
 */
#include <string.h>

/* Sums that are taken at a time stay in registers: with AVX-512 there are 32 of 16 floats, else 16 of 8 (AVX2). In
 * both cases every sum is taken in the same order, to the same bits. */
#ifdef __AVX512F__
#define LANES 16
#define SUMS 24
#else
#define LANES 8
#define SUMS 12
#endif
#define SIDE 6 /* of the input that a tile needs; two rows and columns of it belong to its neighbours */
#define INNER 4 /* of the output that it gives */
#define SPOTS (SIDE * SIDE)
#define TILES 24 /* a multiple of SUMS */
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 36")
typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

struct shape {
    int batch, height, width, in, out;
};

struct strides { /* of the weights, in floats */
    long out, in, row, column;
};

INLINE lanes get(const float *from) { return *(const lanes *)from; }
INLINE void put(float *to, lanes value) { *(lanes *)to = value; }
INLINE int at_most(int a, int b) { return a < b ? a : b; }
INLINE long padded(int channels) { return (channels + LANES - 1) / LANES * LANES; }

/* The transforms of one line, whose values lie `step` apart: B, G and A of the paper, and G and A transposed. */

INLINE void transform_input_line(lanes *d, int step) {
    lanes d0 = d[0], d1 = d[step], d2 = d[2 * step], d3 = d[3 * step], d4 = d[4 * step], d5 = d[5 * step];
    lanes even = d4 - 4 * d2, odd = d3 - 4 * d1, near = d4 - d2, far = 2 * (d3 - d1);
    d[0] = 4 * d0 - 5 * d2 + d4;
    d[step] = even + odd;
    d[2 * step] = even - odd;
    d[3 * step] = near + far;
    d[4 * step] = near - far;
    d[5 * step] = 4 * d1 - 5 * d3 + d5;
}

INLINE void transform_weight_line(const lanes *g, int step, lanes *to, int to_step) {
    lanes near = g[0] + g[2 * step], far = g[0] + 4 * g[2 * step], middle = g[step];
    to[0] = g[0] * 0.25f;
    to[to_step] = (near + middle) * (-1 / 6.0f);
    to[2 * to_step] = (near - middle) * (-1 / 6.0f);
    to[3 * to_step] = (far + 2 * middle) * (1 / 24.0f);
    to[4 * to_step] = (far - 2 * middle) * (1 / 24.0f);
    to[5 * to_step] = g[2 * step];
}

INLINE void transform_output_line(const lanes *m, int step, lanes *to, int to_step) {
    lanes near = m[step] + m[2 * step], near_odd = m[step] - m[2 * step];
    lanes far = m[3 * step] + m[4 * step], far_odd = m[3 * step] - m[4 * step];
    to[0] = m[0] + near + far;
    to[to_step] = near_odd + 2 * far_odd;
    to[2 * to_step] = near + 4 * far;
    to[3 * to_step] = near_odd + 8 * far_odd + m[5 * step];
}

INLINE void transform_above_line(const lanes *y, int step, lanes *to, int to_step) {
    lanes y0 = y[0], y1 = y[step], y2 = y[2 * step], y3 = y[3 * step];
    lanes near = y0 + y2, near_odd = y1 + y3, far = y0 + 4 * y2, far_odd = 2 * y1 + 8 * y3;
    to[0] = y0;
    to[to_step] = near + near_odd;
    to[2 * to_step] = near - near_odd;
    to[3 * to_step] = far + far_odd;
    to[4 * to_step] = far - far_odd;
    to[5 * to_step] = y3;
}

INLINE void transform_sums_line(const lanes *u, int step, lanes *to, int to_step) {
    lanes near = (u[step] + u[2 * step]) * (1 / 6.0f), near_odd = (u[2 * step] - u[step]) * (1 / 6.0f);
    lanes far = u[3 * step] + u[4 * step], far_odd = u[3 * step] - u[4 * step];
    to[0] = u[0] * 0.25f - near + far * (1 / 24.0f);
    to[to_step] = near_odd + far_odd * (1 / 12.0f);
    to[2 * to_step] = far * (1 / 6.0f) - near + u[5 * step];
}

/* One tile of the input to [spot][tile][in]. The last channels go together with some that were done before: the same
 * values are written once more. */
static void transform_input(float *to, long spot, const float *image, int top, int left, const struct shape *s) {
    int within = top > 0 && left > 0 && top + SIDE - 1 <= s->height && left + SIDE - 1 <= s->width;
    for (int from = 0; from < s->in; from += LANES) {
        int c = at_most(from, s->in - LANES);
        lanes d[SPOTS];
        if (within) {
            const float *corner = image + ((long)(top - 1) * s->width + left - 1) * s->in + c;
            UNROLL for (int k = 0; k < SPOTS; k++)
                d[k] = get(corner + ((long)(k / SIDE) * s->width + k % SIDE) * s->in);
        } else {
            for (int k = 0; k < SPOTS; k++) {
                int row = top - 1 + k / SIDE, column = left - 1 + k % SIDE;
                int outside = row < 0 || column < 0 || row >= s->height || column >= s->width;
                d[k] = outside ? (lanes){0} : get(image + ((long)row * s->width + column) * s->in + c);
            }
        }
        UNROLL for (int column = 0; column < SIDE; column++) transform_input_line(d + column, SIDE);
        UNROLL for (int row = 0; row < SIDE; row++) transform_input_line(d + row * SIDE, 1);
        UNROLL for (int k = 0; k < SPOTS; k++) put(to + k * spot + c, d[k]);
    }
}

static void transform_output(float *image, const float *from, long spot, int top, int left, const struct shape *s) {
    int rows = at_most(INNER, s->height - top), columns = at_most(INNER, s->width - left);
    for (int first = 0; first < s->out; first += LANES) {
        int c = at_most(first, s->out - LANES);
        lanes m[SPOTS], half[INNER * SIDE], result[INNER * INNER];
        UNROLL for (int k = 0; k < SPOTS; k++) m[k] = get(from + k * spot + c);
        UNROLL for (int column = 0; column < SIDE; column++)
            transform_output_line(m + column, SIDE, half + column, SIDE);
        UNROLL for (int row = 0; row < INNER; row++)
            transform_output_line(half + row * SIDE, 1, result + row * INNER, 1);
        for (int row = 0; row < rows; row++)
            for (int column = 0; column < columns; column++)
                put(image + ((long)(top + row) * s->width + left + column) * s->out + c, result[row * INNER + column]);
    }
}

/* One tile of the gradient of the output to [spot][tile][out]; nothing comes from beyond the map. */
static void transform_above(float *to, long spot, const float *image, int top, int left, const struct shape *s) {
    for (int first = 0; first < s->out; first += LANES) {
        int c = at_most(first, s->out - LANES);
        lanes y[INNER * INNER], half[SIDE * INNER], m[SPOTS];
        UNROLL for (int k = 0; k < INNER * INNER; k++) {
            int row = top + k / INNER, column = left + k % INNER;
            int outside = row >= s->height || column >= s->width;
            y[k] = outside ? (lanes){0} : get(image + ((long)row * s->width + column) * s->out + c);
        }
        UNROLL for (int column = 0; column < INNER; column++)
            transform_above_line(y + column, INNER, half + column, INNER);
        UNROLL for (int row = 0; row < SIDE; row++) transform_above_line(half + row * INNER, 1, m + row * SIDE, 1);
        UNROLL for (int k = 0; k < SPOTS; k++) put(to + k * spot + c, m[k]);
    }
}

/* To [spot][in][padded out], zeros behind the last channel. Flipped: the kernel turned by 180 degrees. */
static void transform_weights(float *to, const float *weights, const struct strides *at, int flipped,
                              const struct shape *s)
{
    long wide = padded(s->out), spot = s->in * wide;
    for (int i = 0; i < s->in; i++)
        for (int o = 0; o < wide; o += LANES) {
            lanes g[9], half[3 * SIDE], u[SPOTS];
            for (int k = 0; k < 9; k++) {
                int tap = flipped ? 8 - k : k;
                const float *found = weights + i * at->in + tap / 3 * at->row + tap % 3 * at->column;
                g[k] = (lanes){0};
                for (int l = 0; l < at_most(LANES, s->out - o); l++) g[k][l] = found[(o + l) * at->out];
            }
            UNROLL for (int column = 0; column < 3; column++) transform_weight_line(g + column, 3, half + column, 3);
            UNROLL for (int row = 0; row < SIDE; row++) transform_weight_line(half + row * 3, 1, u + row * SIDE, 1);
            UNROLL for (int k = 0; k < SPOTS; k++) put(to + k * spot + i * wide + o, u[k]);
        }
}

/* [TILES][in] times [in][WIDE registers]: ROWS x WIDE sums at a time, in registers all the while. (A macro: arrays whose
 * sizes are arguments would be kept in memory.) */
#define PRODUCT(NAME, ROWS, WIDE) \
    static void NAME(float *m, const float *v, const float *u, int in, long v_row, long m_row) { \
        for (int first = 0; first < TILES; first += ROWS, v += ROWS * v_row, m += ROWS * m_row) { \
            lanes sums[ROWS][WIDE], line[WIDE]; \
            UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int k = 0; k < WIDE; k++) sums[r][k] = (lanes){0}; \
            for (int i = 0; i < in; i++) { \
                UNROLL for (int k = 0; k < WIDE; k++) line[k] = get(u + i * m_row + k * LANES); \
                UNROLL for (int r = 0; r < ROWS; r++) \
                    UNROLL for (int k = 0; k < WIDE; k++) sums[r][k] += v[r * v_row + i] * line[k]; \
            } \
            UNROLL for (int r = 0; r < ROWS; r++) \
                UNROLL for (int k = 0; k < WIDE; k++) put(m + r * m_row + k * LANES, sums[r][k]); \
        } \
    }
PRODUCT(product_by_1, SUMS, 1)
PRODUCT(product_by_2, SUMS / 2, 2)
PRODUCT(product_by_4, SUMS / 4, 4)

/* Adds [tiles][in] transposed, times [tiles][WIDE registers], to [in][WIDE registers]: over all padded channels. */
#define SUM(NAME, ROWS, WIDE) \
    static void NAME(float *u, const float *v, const float *m, int tiles, long in, long out) { \
        for (long first = 0; first < in; first += ROWS, v += ROWS, u += ROWS * out) { \
            lanes sums[ROWS][WIDE], line[WIDE]; \
            UNROLL for (int r = 0; r < ROWS; r++) \
                UNROLL for (int k = 0; k < WIDE; k++) sums[r][k] = get(u + r * out + k * LANES); \
            for (int t = 0; t < tiles; t++) { \
                UNROLL for (int k = 0; k < WIDE; k++) line[k] = get(m + t * out + k * LANES); \
                UNROLL for (int r = 0; r < ROWS; r++) \
                    UNROLL for (int k = 0; k < WIDE; k++) sums[r][k] += v[t * in + r] * line[k]; \
            } \
            UNROLL for (int r = 0; r < ROWS; r++) \
                UNROLL for (int k = 0; k < WIDE; k++) put(u + r * out + k * LANES, sums[r][k]); \
        } \
    }
SUM(sum_by_1, LANES, 1)
SUM(sum_by_2, LANES / 2, 2)
SUM(sum_by_4, LANES / 4, 4)

/* Where tile number `tile` of the batch is. */
struct place {
    long image;
    int top, left;
};

INLINE struct place place_of(long tile, const struct shape *s) {
    int across = (s->width + INNER - 1) / INNER, of_image = across * ((s->height + INNER - 1) / INNER);
    int within = (int)(tile % of_image);
    return (struct place){tile / of_image * s->height * s->width, within / across * INNER, within % across * INNER};
}

INLINE long tiles_of(const struct shape *s) {
    return (long)s->batch * ((s->width + INNER - 1) / INNER) * ((s->height + INNER - 1) / INNER);
}

/* How many floats of room both functions below need for what is between their stages. */
long winograd_room(int in, int out) {
    return SPOTS * (padded(in) * padded(out) + TILES * (padded(in) + padded(out)));
}

void winograd(float *output, const float *input, const float *weights, float *room, const struct strides *strides,
              int flipped, const struct shape *s)
{
    long tiles = tiles_of(s), in = padded(s->in), out = padded(s->out);
    float *u = room, *v = u + SPOTS * s->in * out, *m = v + SPOTS * TILES * in;
    memset(v, 0, sizeof(float) * SPOTS * TILES * in); /* the last block may not fill all tiles */
    transform_weights(u, weights, strides, flipped, s);
    for (long first = 0; first < tiles; first += TILES) {
        int count = tiles - first < TILES ? (int)(tiles - first) : TILES;
        for (int t = 0; t < count; t++) {
            struct place at = place_of(first + t, s);
            transform_input(v + t * in, TILES * in, input + at.image * s->in, at.top, at.left, s);
        }
        for (int k = 0; k < SPOTS; k++)
            for (long o = 0, wide; o < out; o += wide * LANES) {
                long rest = (out - o) / LANES;
                wide = rest >= 4 ? 4 : rest >= 2 ? 2 : 1;
                float *to = m + k * TILES * out + o;
                const float *left = v + k * TILES * in, *right = u + k * s->in * out + o;
                if (wide == 4) product_by_4(to, left, right, s->in, in, out);
                else if (wide == 2) product_by_2(to, left, right, s->in, in, out);
                else product_by_1(to, left, right, s->in, in, out);
            }
        for (int t = 0; t < count; t++) {
            struct place at = place_of(first + t, s);
            transform_output(output + at.image * s->out, m + t * out, TILES * out, at.top, at.left, s);
        }
    }
}

/* The gradient of the weights, strides as theirs, from the input and the gradient of the output. */
void winograd_weight_gradient(float *gradient, const float *input, const float *above, float *room,
                              const struct strides *strides, const struct shape *s)
{
    long tiles = tiles_of(s), in = padded(s->in), out = padded(s->out);
    float *u = room, *v = u + SPOTS * in * out, *m = v + SPOTS * TILES * in;
    memset(room, 0, sizeof(float) * winograd_room(s->in, s->out)); /* also behind the last channels */
    for (long first = 0; first < tiles; first += TILES) {
        int count = tiles - first < TILES ? (int)(tiles - first) : TILES;
        for (int t = 0; t < count; t++) {
            struct place at = place_of(first + t, s);
            transform_input(v + t * in, TILES * in, input + at.image * s->in, at.top, at.left, s);
            transform_above(m + t * out, TILES * out, above + at.image * s->out, at.top, at.left, s);
        }
        for (int k = 0; k < SPOTS; k++)
            for (long o = 0, wide; o < out; o += wide * LANES) {
                long rest = (out - o) / LANES;
                wide = rest >= 4 ? 4 : rest >= 2 ? 2 : 1;
                float *to = u + k * in * out + o;
                const float *left = v + k * TILES * in, *right = m + k * TILES * out + o;
                if (wide == 4) sum_by_4(to, left, right, count, in, out);
                else if (wide == 2) sum_by_2(to, left, right, count, in, out);
                else sum_by_1(to, left, right, count, in, out);
            }
    }
    for (int i = 0; i < s->in; i++)
        for (int o = 0; o < s->out; o += LANES) {
            lanes sums[SPOTS], half[3 * SIDE], g[9];
            UNROLL for (int k = 0; k < SPOTS; k++) sums[k] = get(u + k * in * out + i * out + o);
            UNROLL for (int column = 0; column < SIDE; column++)
                transform_sums_line(sums + column, SIDE, half + column, SIDE);
            UNROLL for (int row = 0; row < 3; row++) transform_sums_line(half + row * SIDE, 1, g + row * 3, 1);
            for (int k = 0; k < 9; k++) {
                float *to = gradient + i * strides->in + k / 3 * strides->row + k % 3 * strides->column;
                for (int l = 0; l < at_most(LANES, s->out - o); l++) to[(o + l) * strides->out] = g[k][l];
            }
        }
}
