/* 2d convolution with 3x3 kernels, stride 1 and padding 1, channels innermost, by Winograd's F(4x4, 3x3).
 *
 *   input   [batch][height][width][in]     output [batch][height][width][out]     in, out: at least LANES
 *
 * Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", 2016: 4x4 results of a tile come from 36 products
 * per pair of channels instead of 144, for some additions before and after and about one more digit of rounding.
 * TILES tiles at a time go through all three stages, so that nothing between them leaves the second cache. Every sum is
 * taken in a fixed order: the same input gives the same bits.
 */
#define LANES 16
#define SIDE 6 /* of the input that a tile needs; two rows and columns of it belong to its neighbours */
#define INNER 4 /* of the output that it gives */
#define SPOTS (SIDE * SIDE)
#define TILES 24 /* a multiple of the rows of every product below */
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

/* The three transforms of one line, whose values lie `step` apart. */

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
PRODUCT(product_by_1, 24, 1)
PRODUCT(product_by_2, 12, 2)
PRODUCT(product_by_4, 6, 4)

/* How many floats of room `winograd` needs for what is between its stages. */
long winograd_room(int in, int out) { return SPOTS * (in * padded(out) + TILES * (padded(in) + padded(out))); }

void winograd(float *output, const float *input, const float *weights, float *room, const struct strides *at,
              int flipped, const struct shape *s)
{
    int across = (s->width + INNER - 1) / INNER, of_image = across * ((s->height + INNER - 1) / INNER);
    long tiles = (long)s->batch * of_image, in = padded(s->in), out = padded(s->out);
    float *u = room, *v = u + SPOTS * s->in * out, *m = v + SPOTS * TILES * in;
    for (long k = 0; k < SPOTS * TILES * in; k++) v[k] = 0; /* the last block may not fill all tiles */
    transform_weights(u, weights, at, flipped, s);
    for (long first = 0; first < tiles; first += TILES) {
        int count = tiles - first < TILES ? (int)(tiles - first) : TILES;
        for (int t = 0; t < count; t++) {
            int tile = (int)((first + t) % of_image);
            const float *image = input + (first + t) / of_image * s->height * s->width * s->in;
            transform_input(v + t * in, TILES * in, image, tile / across * INNER, tile % across * INNER, s);
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
            int tile = (int)((first + t) % of_image);
            float *image = output + (first + t) / of_image * s->height * s->width * s->out;
            transform_output(image, m + t * out, TILES * out, tile / across * INNER, tile % across * INNER, s);
        }
    }
}
