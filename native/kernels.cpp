// Kernels of the operators "strata::…" (strata/export/operators.py says what each computes). NCHW float32, one thread.
//
// Scratch is one block of some BLOCK floats per thread, whatever the network. Results may lie where the first operand
// did, for those operators that the exporter's memory planner places so (strata/export/planner.py): they read an element
// before they write it, and nothing after.
#include "kernels.h"

#include <executorch/runtime/kernel/kernel_includes.h>
#include <executorch/runtime/kernel/operator_registry.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <vector>

using executorch::aten::ArrayRef;
using executorch::aten::Tensor;
using executorch::runtime::Error;
using executorch::runtime::EValue;
using executorch::runtime::Kernel;
using executorch::runtime::KernelRuntimeContext;
using executorch::runtime::Span;

namespace strata {
thread_local Surroundings* surroundings = nullptr;

namespace {
constexpr int V = 8, BLOCK = 32768;
typedef float vec __attribute__((vector_size(4 * V), aligned(4), may_alias));

thread_local std::vector<float> scratch;
float* room(size_t count) {
  if (scratch.size() < count) scratch.resize(count);
  return scratch.data();
}

// What a kernel is called with, by position; its results come last.
struct Arguments {
  KernelRuntimeContext& context;
  Span<EValue*> values;

  const Tensor& tensor(int at) const { return values[at]->toTensor(); }
  const float* floats(int at) const { return tensor(at).const_data_ptr<float>(); }
  const float* optional(int at) const {  // null where there is none
    return values[at]->isNone() ? nullptr : floats(at);
  }
  long size(int at, int dim) const { return tensor(at).size(dim); }
  long integer(int at) const { return values[at]->toInt(); }
  double real(int at) const { return values[at]->isInt() ? double(values[at]->toInt()) : values[at]->toDouble(); }
  bool boolean(int at) const { return values[at]->toBool(); }
  ArrayRef<int64_t> list(int at) const { return values[at]->toIntList(); }

  // A result of this shape; null where it does not fit what was planned, which ends the program with an error.
  template <typename T = float>
  T* result(int at, std::initializer_list<long> sizes) const {
    std::vector<executorch::aten::SizesType> shape(sizes.begin(), sizes.end());
    return result<T>(at, shape.data(), shape.size());
  }
  template <typename T = float>
  T* result(int at, const executorch::aten::SizesType* sizes, size_t dims) const {
    Tensor& out = values[at]->toTensor();
    if (executorch::runtime::resize_tensor(out, {sizes, dims}) != Error::Ok) {
      context.fail(Error::InvalidArgument);
      return nullptr;
    }
    return out.mutable_data_ptr<T>();
  }
  float* like(int at, int other) const {
    auto sizes = tensor(other).sizes();
    return result(at, sizes.data(), sizes.size());
  }
};

// --- products of matrices ---------------------------------------------------------------------------------------------

// C[M x 2V] = A[M x k] B[k x 2V] (+ bias per row); A by strides
template <int M>
inline void tile(float* C, long ldc, const float* A, long ra, long ca, const float* B, long ldb, long k,
                 const float* bias) {
  vec s[M][2];
  for (int i = 0; i < M; ++i) s[i][0] = s[i][1] = vec{} + (bias ? bias[i] : 0);
  for (long j = 0; j < k; ++j) {
    vec b0 = *(const vec*)(B + j * ldb), b1 = *(const vec*)(B + j * ldb + V);
    for (int i = 0; i < M; ++i) {
      float a = A[i * ra + j * ca];
      s[i][0] += a * b0;
      s[i][1] += a * b1;
    }
  }
  for (int i = 0; i < M; ++i) {
    *(vec*)(C + i * ldc) = s[i][0];
    *(vec*)(C + i * ldc + V) = s[i][1];
  }
}

// C[m x p] = A[m x k] B[k x p] (+ bias per row)
void product(float* C, long ldc, const float* A, long ra, long ca, const float* B, long ldb, long m, long k, long p,
             const float* bias) {
  long q = 0;
  for (; q + 2 * V <= p; q += 2 * V) {
    long i = 0;
    auto row = [&](long at) { return bias ? bias + at : nullptr; };
    for (; i + 6 <= m; i += 6) tile<6>(C + i * ldc + q, ldc, A + i * ra, ra, ca, B + q, ldb, k, row(i));
    for (; i + 2 <= m; i += 2) tile<2>(C + i * ldc + q, ldc, A + i * ra, ra, ca, B + q, ldb, k, row(i));
    for (; i < m; ++i) tile<1>(C + i * ldc + q, ldc, A + i * ra, ra, ca, B + q, ldb, k, row(i));
  }
  for (; q < p; ++q)
    for (long i = 0; i < m; ++i) {
      float s = bias ? bias[i] : 0;
      for (long j = 0; j < k; ++j) s += A[i * ra + j * ca] * B[j * ldb + q];
      C[i * ldc + q] = s;
    }
}

// G[M x K] += D[M x p] B[K x p]^T
template <int M, int K>
inline void dots(float* G, long ldg, const float* D, long ldd, const float* B, long ldb, long p) {
  vec s[M][K];
  for (auto& row : s)
    for (auto& one : row) one = vec{};
  long q = 0;
  for (; q + V <= p; q += V)
    for (int i = 0; i < M; ++i) {
      vec d = *(const vec*)(D + i * ldd + q);
      for (int j = 0; j < K; ++j) s[i][j] += d * *(const vec*)(B + j * ldb + q);
    }
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < K; ++j) {
      float t = 0;
      for (int l = 0; l < V; ++l) t += s[i][j][l];
      for (long r = q; r < p; ++r) t += D[i * ldd + r] * B[j * ldb + r];
      G[i * ldg + j] += t;
    }
}

template <int M>
void dot_rows(float* G, long ldg, const float* D, long ldd, const float* B, long ldb, long k, long p) {
  long j = 0;
  for (; j + 3 <= k; j += 3) dots<M, 3>(G + j, ldg, D, ldd, B + j * ldb, ldb, p);
  for (; j < k; ++j) dots<M, 1>(G + j, ldg, D, ldd, B + j * ldb, ldb, p);
}

// G[m x k] += D[m x p] B[k x p]^T
void product_transposed(float* G, long ldg, const float* D, long ldd, const float* B, long ldb, long m, long k, long p) {
  long i = 0;
  for (; i + 4 <= m; i += 4) dot_rows<4>(G + i * ldg, ldg, D + i * ldd, ldd, B, ldb, k, p);
  for (; i < m; ++i) dot_rows<1>(G + i * ldg, ldg, D + i * ldd, ldd, B, ldb, k, p);
}

// --- convolutions -----------------------------------------------------------------------------------------------------

struct Convolution {
  long n, c, h, w, o, kh, kw, oh, ow, sh, sw, ph, pw, dh, dw, groups, cg, og, k;

  Convolution(const Arguments& a, int weight, int options, long n, long c, long h, long w)
      : n(n), c(c), h(h), w(w), o(a.size(weight, 0)), kh(a.size(weight, 2)), kw(a.size(weight, 3)) {
    auto stride = a.list(options), padding = a.list(options + 1), dilation = a.list(options + 2);
    sh = stride[0], sw = stride[1], ph = padding[0], pw = padding[1], dh = dilation[0], dw = dilation[1];
    groups = a.integer(options + 3);
    cg = c / groups, og = o / groups, k = cg * kh * kw;
    oh = (h + 2 * ph - dh * (kh - 1) - 1) / sh + 1, ow = (w + 2 * pw - dw * (kw - 1) - 1) / sw + 1;
  }
  long pixels() const { return oh * ow; }
  // rows of the output at a time, so that their columns fit the scratch
  long rows() const { return std::max(1L, std::min(oh, BLOCK / (k * ow))); }
  bool pointwise() const { return kh == 1 && kw == 1 && sh == 1 && sw == 1 && !ph && !pw; }
};

// The inputs of output rows [y0, y1) of one image and group: col[k][(y - y0) * ow + x], ld floats a row.
void gather(float* col, long ld, const float* x, const Convolution& v, long y0, long y1) {
  for (long c = 0; c < v.cg; ++c)
    for (long a = 0; a < v.kh; ++a)
      for (long b = 0; b < v.kw; ++b, col += ld) {
        float* to = col;
        for (long y = y0; y < y1; ++y, to += v.ow) {
          long iy = y * v.sh - v.ph + a * v.dh, off = b * v.dw - v.pw;
          if (iy < 0 || iy >= v.h) {
            memset(to, 0, v.ow * sizeof(float));
            continue;
          }
          const float* row = x + (c * v.h + iy) * v.w;
          if (v.sw == 1) {
            long lo = std::min(std::max(0L, -off), v.ow), hi = std::max(lo, std::min(v.ow, v.w - off));
            std::fill(to, to + lo, 0.f);
            memcpy(to + lo, row + lo + off, (hi - lo) * sizeof(float));
            std::fill(to + hi, to + v.ow, 0.f);
          } else {
            for (long i = 0; i < v.ow; ++i) {
              long ix = i * v.sw + off;
              to[i] = ix >= 0 && ix < v.w ? row[ix] : 0;
            }
          }
        }
      }
}

// The way back: adds to the inputs.
void scatter(const float* col, long ld, float* x, const Convolution& v, long y0, long y1) {
  for (long c = 0; c < v.cg; ++c)
    for (long a = 0; a < v.kh; ++a)
      for (long b = 0; b < v.kw; ++b, col += ld) {
        const float* from = col;
        for (long y = y0; y < y1; ++y, from += v.ow) {
          long iy = y * v.sh - v.ph + a * v.dh, off = b * v.dw - v.pw;
          if (iy < 0 || iy >= v.h) continue;
          float* row = x + (c * v.h + iy) * v.w;
          if (v.sw == 1) {
            long lo = std::max(0L, -off), hi = std::min(v.ow, v.w - off);
            for (long i = lo; i < hi; ++i) row[i + off] += from[i];
          } else {
            for (long i = 0; i < v.ow; ++i) {
              long ix = i * v.sw + off;
              if (ix >= 0 && ix < v.w) row[ix] += from[i];
            }
          }
        }
      }
}

// x, w, b, stride, padding, dilation, groups -> out
void conv2d(Arguments a) {
  Convolution v(a, 1, 3, a.size(0, 0), a.size(0, 1), a.size(0, 2), a.size(0, 3));
  const float *x = a.floats(0), *w = a.floats(1), *b = a.optional(2);
  float* out = a.result(7, {v.n, v.o, v.oh, v.ow});
  if (!out) return;
  long pixels = v.pixels(), rows = v.rows();
  for (long n = 0; n < v.n; ++n)
    for (long g = 0; g < v.groups; ++g) {
      const float *xi = x + (n * v.c + g * v.cg) * v.h * v.w, *wi = w + g * v.og * v.k, *bi = b ? b + g * v.og : nullptr;
      float* oi = out + (n * v.o + g * v.og) * pixels;
      if (v.pointwise()) {
        product(oi, pixels, wi, v.k, 1, xi, pixels, v.og, v.k, pixels, bi);
        continue;
      }
      for (long y = 0; y < v.oh; y += rows) {
        long end = std::min(v.oh, y + rows), len = (end - y) * v.ow;
        float* col = room(v.k * rows * v.ow);
        gather(col, len, xi, v, y, end);
        product(oi + y * v.ow, pixels, wi, v.k, 1, col, len, v.og, v.k, len, bi);
      }
    }
}

// dy, w, height, width, stride, padding, dilation, groups -> dx
void conv2d_grad_input(Arguments a) {
  Convolution v(a, 1, 4, a.size(0, 0), a.size(1, 1) * a.integer(7), a.integer(2), a.integer(3));
  const float *dy = a.floats(0), *w = a.floats(1);
  float* out = a.result(8, {v.n, v.c, v.h, v.w});
  if (!out) return;
  long pixels = v.pixels(), rows = v.rows();
  if (!v.pointwise()) std::fill(out, out + v.n * v.c * v.h * v.w, 0.f);
  for (long n = 0; n < v.n; ++n)
    for (long g = 0; g < v.groups; ++g) {
      float* xi = out + (n * v.c + g * v.cg) * v.h * v.w;
      const float *di = dy + (n * v.o + g * v.og) * pixels, *wi = w + g * v.og * v.k;
      if (v.pointwise()) {
        product(xi, pixels, wi, 1, v.k, di, pixels, v.k, v.og, pixels, nullptr);
        continue;
      }
      for (long y = 0; y < v.oh; y += rows) {
        long end = std::min(v.oh, y + rows), len = (end - y) * v.ow;
        float* col = room(v.k * rows * v.ow);
        product(col, len, wi, 1, v.k, di + y * v.ow, pixels, v.k, v.og, len, nullptr);
        scatter(col, len, xi, v, y, end);
      }
    }
}

// dy, x, w, stride, padding, dilation, groups -> dw
void conv2d_grad_weight(Arguments a) {
  Convolution v(a, 2, 3, a.size(1, 0), a.size(1, 1), a.size(1, 2), a.size(1, 3));
  const float *dy = a.floats(0), *x = a.floats(1);
  float* out = a.like(7, 2);
  if (!out) return;
  long pixels = v.pixels(), rows = v.rows();
  std::fill(out, out + v.o * v.k, 0.f);
  for (long n = 0; n < v.n; ++n)
    for (long g = 0; g < v.groups; ++g) {
      const float *xi = x + (n * v.c + g * v.cg) * v.h * v.w, *di = dy + (n * v.o + g * v.og) * pixels;
      float* wi = out + g * v.og * v.k;
      if (v.pointwise()) {
        product_transposed(wi, v.k, di, pixels, xi, pixels, v.og, v.k, pixels);
        continue;
      }
      for (long y = 0; y < v.oh; y += rows) {
        long end = std::min(v.oh, y + rows), len = (end - y) * v.ow;
        float* col = room(v.k * rows * v.ow);
        gather(col, len, xi, v, y, end);
        product_transposed(wi, v.k, di + y * v.ow, pixels, col, len, v.og, v.k, len);
      }
    }
}

// --- linear layers ----------------------------------------------------------------------------------------------------

long rows_of(const Tensor& x) { return x.numel() / std::max<long>(1, x.size(x.dim() - 1)); }

// x [..., K], w [O, K], b -> [..., O]
void linear(Arguments a) {
  const Tensor& x = a.tensor(0);
  long in = a.size(1, 1), out = a.size(1, 0), rows = rows_of(x);
  std::vector<executorch::aten::SizesType> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = out;
  float* y = a.result(3, sizes.data(), sizes.size());
  if (!y) return;
  const float* b = a.optional(2);
  for (long i = 0; i < rows; ++i)
    for (long j = 0; j < out; ++j) y[i * out + j] = b ? b[j] : 0;
  product_transposed(y, out, a.floats(0), in, a.floats(1), in, rows, out, in);
}

// dy [..., O], w [O, K] -> [..., K]
void linear_grad_input(Arguments a) {
  const Tensor& dy = a.tensor(0);
  long in = a.size(1, 1), out = a.size(1, 0), rows = rows_of(dy);
  std::vector<executorch::aten::SizesType> sizes(dy.sizes().begin(), dy.sizes().end());
  sizes.back() = in;
  float* dx = a.result(2, sizes.data(), sizes.size());
  if (dx) product(dx, in, a.floats(0), out, 1, a.floats(1), in, rows, out, in, nullptr);
}

// dy [..., O], x [..., K] -> [O, K]
void linear_grad_weight(Arguments a) {
  const Tensor &dy = a.tensor(0), &x = a.tensor(1);
  long out = dy.size(dy.dim() - 1), in = x.size(x.dim() - 1);
  float* dw = a.result(2, {out, in});
  if (dw) product(dw, in, a.floats(0), 1, out, a.floats(1), in, out, rows_of(x), in, nullptr);
}

// [..., K] -> [K]
void row_sum(Arguments a) {
  const Tensor& x = a.tensor(0);
  long width = x.size(x.dim() - 1), rows = rows_of(x);
  float* out = a.result(1, {width});
  if (!out) return;
  for (long j = 0; j < width; ++j) {
    double s = 0;
    for (long i = 0; i < rows; ++i) s += a.floats(0)[i * width + j];
    out[j] = float(s);
  }
}

// --- batch norms ------------------------------------------------------------------------------------------------------

struct Planes {  // [n, c, ...] of p elements a plane
  long n, c, p;
  explicit Planes(const Tensor& x) : n(x.size(0)), c(x.size(1)), p(x.numel() / std::max<long>(1, x.size(0) * x.size(1))) {}
  long at(long i, long j) const { return (i * c + j) * p; }
  double count() const { return double(n) * p; }
};

void channel_sum(Arguments a) {
  Planes v(a.tensor(0));
  const float* x = a.floats(0);
  float* out = a.result(1, {v.c});
  if (!out) return;
  for (long c = 0; c < v.c; ++c) {
    double s = 0;
    for (long n = 0; n < v.n; ++n) {
      float part = 0;
      for (long i = 0; i < v.p; ++i) part += x[v.at(n, c) + i];
      s += part;
    }
    out[c] = float(s);
  }
}

void mean_and_squares(const float* x, const Planes& v, long c, double& mean, double& squares) {
  double sum = 0;
  for (long n = 0; n < v.n; ++n) {
    const float* xi = x + v.at(n, c);
    float part = 0;
    for (long i = 0; i < v.p; ++i) part += xi[i];
    sum += part;
  }
  mean = sum / v.count();
  squares = 0;
  float m = float(mean);
  for (long n = 0; n < v.n; ++n) {
    const float* xi = x + v.at(n, c);
    float part = 0;
    for (long i = 0; i < v.p; ++i) part += (xi[i] - m) * (xi[i] - m);
    squares += part;
  }
}

void affine(const float* x, float* out, const Planes& v, long c, float mean, float scale, float shift) {
  for (long n = 0; n < v.n; ++n) {
    const float* xi = x + v.at(n, c);
    float* oi = out + v.at(n, c);
    for (long i = 0; i < v.p; ++i) oi[i] = (xi[i] - mean) * scale + shift;
  }
}

// x, w, b, eps -> out, mean, and invstd or (`running`) the variance over n - 1
void normalised_by_batch(Arguments a, bool running) {
  Planes v(a.tensor(0));
  const float *x = a.floats(0), *w = a.optional(1), *b = a.optional(2);
  double eps = a.real(3);
  float *out = a.like(4, 0), *means = a.result(5, {v.c}), *others = a.result(6, {v.c});
  if (!out || !means || !others) return;
  for (long c = 0; c < v.c; ++c) {
    double mean, squares;
    mean_and_squares(x, v, c, mean, squares);
    float invstd = float(1 / std::sqrt(squares / v.count() + eps));
    means[c] = float(mean);
    others[c] = running ? float(squares / (v.count() - 1)) : invstd;
    affine(x, out, v, c, float(mean), w ? invstd * w[c] : invstd, b ? b[c] : 0);
  }
}
void batch_norm(Arguments a) { normalised_by_batch(a, false); }
void batch_norm_statistics(Arguments a) { normalised_by_batch(a, true); }

// sums of dy and of dy (x - mean)
void gradient_sums(const float* dy, const float* x, const Planes& v, long c, float mean, double& plain, double& centred) {
  plain = centred = 0;
  for (long n = 0; n < v.n; ++n) {
    const float *gi = dy + v.at(n, c), *xi = x + v.at(n, c);
    float s0 = 0, s1 = 0;
    for (long i = 0; i < v.p; ++i) {
      s0 += gi[i];
      s1 += gi[i] * (xi[i] - mean);
    }
    plain += s0;
    centred += s1;
  }
}

// dy, x, mean, invstd, w -> dx, dw, db
void batch_norm_backward(Arguments a) {
  Planes v(a.tensor(1));
  const float *dy = a.floats(0), *x = a.floats(1), *means = a.floats(2), *invstds = a.floats(3), *w = a.optional(4);
  float *dx = a.like(5, 0), *dw = a.result(6, {v.c}), *db = a.result(7, {v.c});
  if (!dx || !dw || !db) return;
  for (long c = 0; c < v.c; ++c) {
    float mean = means[c], invstd = invstds[c], scale = w ? invstd * w[c] : invstd;
    double plain, centred;
    gradient_sums(dy, x, v, c, mean, plain, centred);
    dw[c] = float(centred * invstd);
    db[c] = float(plain);
    float k1 = float(scale * invstd * invstd * centred / v.count()), k0 = float(scale * plain / v.count());
    for (long n = 0; n < v.n; ++n) {
      const float *gi = dy + v.at(n, c), *xi = x + v.at(n, c);
      float* oi = dx + v.at(n, c);
      for (long i = 0; i < v.p; ++i) oi[i] = scale * gi[i] - k0 - k1 * (xi[i] - mean);
    }
  }
}

// x, w, b, mean, var, eps -> out
void normalise(Arguments a) {
  Planes v(a.tensor(0));
  const float *x = a.floats(0), *w = a.optional(1), *b = a.optional(2), *means = a.floats(3), *vars = a.floats(4);
  double eps = a.real(5);
  float* out = a.like(6, 0);
  if (!out) return;
  for (long c = 0; c < v.c; ++c) {
    float invstd = float(1 / std::sqrt(vars[c] + eps));
    affine(x, out, v, c, means[c], w ? invstd * w[c] : invstd, b ? b[c] : 0);
  }
}

// dy, x, w, mean, var, eps -> dx, dw, db
void normalise_backward(Arguments a) {
  Planes v(a.tensor(1));
  const float *dy = a.floats(0), *x = a.floats(1), *w = a.optional(2), *means = a.floats(3), *vars = a.floats(4);
  double eps = a.real(5);
  float *dx = a.like(6, 0), *dw = a.result(7, {v.c}), *db = a.result(8, {v.c});
  if (!dx || !dw || !db) return;
  for (long c = 0; c < v.c; ++c) {
    float invstd = float(1 / std::sqrt(vars[c] + eps));
    double plain, centred;
    gradient_sums(dy, x, v, c, means[c], plain, centred);
    dw[c] = float(centred * invstd);
    db[c] = float(plain);
    affine(dy, dx, v, c, 0, w ? invstd * w[c] : invstd, 0);
  }
}

// --- element by element -----------------------------------------------------------------------------------------------

template <typename F>
void each(Arguments a, int result, F function) {
  float* out = a.like(result, 0);
  if (!out) return;
  for (long i = 0, n = a.tensor(0).numel(); i < n; ++i) out[i] = function(i);
}
void relu(Arguments a) {
  const float* x = a.floats(0);
  each(a, 1, [x](long i) { return x[i] < 0 ? 0.f : x[i]; });  // NaN stays
}
void relu_backward(Arguments a) {
  const float *dy = a.floats(0), *y = a.floats(1);
  each(a, 2, [=](long i) { return y[i] > 0 ? dy[i] : 0.f; });
}
void clamp(Arguments a) {
  const float *x = a.floats(0), low = float(a.real(1)), high = float(a.real(2));
  each(a, 3, [=](long i) { return x[i] < low ? low : x[i] > high ? high : x[i]; });
}
void clamp_backward(Arguments a) {
  const float *dy = a.floats(0), *x = a.floats(1), low = float(a.real(2)), high = float(a.real(3));
  each(a, 4, [=](long i) { return x[i] > low && x[i] < high ? dy[i] : 0.f; });
}


// x, tanh -> out, as torch has them: by the error function or by its approximation
constexpr float HALF_ROOT = 0.70710678118654752f, DENSITY = 0.39894228040143268f;  // 1/sqrt(2), 1/sqrt(2 pi)
constexpr float TANH_OUTER = 0.79788456080286536f, TANH_INNER = 0.044715f;         // sqrt(2/pi)
void gelu(Arguments a) {
  const float* x = a.floats(0);
  if (a.boolean(1))
    each(a, 2, [x](long i) { return 0.5f * x[i] * (1 + std::tanh(TANH_OUTER * (x[i] + TANH_INNER * x[i] * x[i] * x[i]))); });
  else
    each(a, 2, [x](long i) { return 0.5f * x[i] * (1 + std::erf(x[i] * HALF_ROOT)); });
}
void gelu_backward(Arguments a) {
  const float *dy = a.floats(0), *x = a.floats(1);
  if (a.boolean(2))
    each(a, 3, [=](long i) {
      float z = x[i], t = std::tanh(TANH_OUTER * (z + TANH_INNER * z * z * z));
      return dy[i] * (0.5f * (1 + t) + 0.5f * z * (1 - t * t) * TANH_OUTER * (1 + 3 * TANH_INNER * z * z));
    });
  else
    each(a, 3, [=](long i) {
      float z = x[i];
      return dy[i] * (0.5f * (1 + std::erf(z * HALF_ROOT)) + z * DENSITY * std::exp(-0.5f * z * z));
    });
}
void silu(Arguments a) {
  const float* x = a.floats(0);
  each(a, 1, [x](long i) { return x[i] / (1 + std::exp(-x[i])); });
}
void silu_backward(Arguments a) {
  const float *dy = a.floats(0), *x = a.floats(1);
  each(a, 2, [=](long i) {
    float s = 1 / (1 + std::exp(-x[i]));
    return dy[i] * s * (1 + x[i] * (1 - s));
  });
}

uint64_t mixed(uint64_t z) {  // splitmix64
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}
// x, p, number -> zeros and 1 / (1 - p); drawn by seed, pass, number of the dropout and element
void dropout_mask(Arguments a) {
  double p = a.real(1);
  float kept = p < 1 ? float(1 / (1 - p)) : 0;
  uint64_t seed = surroundings ? surroundings->seed : 0, pass = surroundings ? surroundings->pass : 0;
  uint64_t key = mixed(mixed(seed + 0x9e3779b97f4a7c15ull) ^ mixed((pass << 16) + uint64_t(a.integer(2)) + 1));
  uint64_t least = uint64_t(std::ldexp(p, 53));
  each(a, 3, [=](long i) { return (mixed(key + 0x9e3779b97f4a7c15ull * uint64_t(i + 1)) >> 11) < least ? 0.f : kept; });
}

// gradient, slot -> [1]: into the sums of the batch's parts
void add_to(Arguments a) {
  float* out = a.result(2, {1});
  long slot = a.integer(1), count = a.tensor(0).numel();
  const float* gradient = a.floats(0);
  if (!out) return;
  if (!surroundings || slot < 0 || slot >= long(surroundings->sums.size())) {
    a.context.fail(Error::InvalidState);
    return;
  }
  auto [sum, size] = surroundings->sums[slot];
  if (count != size) {
    a.context.fail(Error::InvalidState);
    return;
  }
  float share = surroundings->share;
  for (long i = 0; i < count; ++i) sum[i] += share * gradient[i];
  out[0] = 0;
}

// --- rows -------------------------------------------------------------------------------------------------------------

// in place: weights that sum to one
void softmax_row(float* row, long count) {
  float most = *std::max_element(row, row + count);
  double sum = 0;
  for (long j = 0; j < count; ++j) sum += row[j] = std::exp(row[j] - most);
  float factor = float(1 / sum);
  for (long j = 0; j < count; ++j) row[j] *= factor;
}

float dot(const float* x, const float* y, long count) {
  float s = 0;
  for (long j = 0; j < count; ++j) s += x[j] * y[j];
  return s;
}

void add_scaled(float* to, const float* from, float factor, long count) {
  for (long j = 0; j < count; ++j) to[j] += factor * from[j];
}

// x -> out, along the last dimension
void softmax(Arguments a) {
  const Tensor& x = a.tensor(0);
  long width = x.dim() ? x.size(x.dim() - 1) : 1, rows = width ? x.numel() / width : 0;
  const float* from = a.floats(0);
  float* out = a.like(1, 0);
  if (!out) return;
  for (long i = 0; i < rows; ++i, from += width, out += width) {
    if (out != from) memcpy(out, from, width * sizeof(float));
    softmax_row(out, width);
  }
}

// dy, y -> dx
void softmax_backward(Arguments a) {
  const Tensor& x = a.tensor(0);
  long width = x.dim() ? x.size(x.dim() - 1) : 1, rows = width ? x.numel() / width : 0;
  const float *dy = a.floats(0), *y = a.floats(1);
  float* out = a.like(2, 0);
  if (!out) return;
  for (long i = 0; i < rows; ++i, dy += width, y += width, out += width) {
    float along = dot(dy, y, width);
    for (long j = 0; j < width; ++j) out[j] = y[j] * (dy[j] - along);
  }
}

// x, w, b, width, eps -> out, mean, invstd of each row
void layer_norm(Arguments a) {
  long width = a.integer(3), rows = a.tensor(0).numel() / std::max(1L, width);
  const float *x = a.floats(0), *w = a.optional(1), *b = a.optional(2);
  double eps = a.real(4);
  float *out = a.like(5, 0), *means = a.result(6, {rows}), *invstds = a.result(7, {rows});
  if (!out || !means || !invstds) return;
  for (long i = 0; i < rows; ++i, x += width, out += width) {
    double sum = 0, squares = 0;
    for (long j = 0; j < width; ++j) sum += x[j];
    float mean = float(sum / width);
    for (long j = 0; j < width; ++j) squares += double(x[j] - mean) * (x[j] - mean);
    float invstd = float(1 / std::sqrt(squares / width + eps));
    means[i] = mean;
    invstds[i] = invstd;
    for (long j = 0; j < width; ++j) out[j] = (x[j] - mean) * invstd * (w ? w[j] : 1) + (b ? b[j] : 0);
  }
}

// dy, x, mean, invstd, w, width -> dx, dw, db
void layer_norm_backward(Arguments a) {
  long width = a.integer(5), rows = a.tensor(1).numel() / std::max(1L, width);
  const float *dy = a.floats(0), *x = a.floats(1), *means = a.floats(2), *invstds = a.floats(3), *w = a.optional(4);
  float *dx = a.like(6, 1), *dw = a.result(7, {width}), *db = a.result(8, {width});
  if (!dx || !dw || !db) return;
  std::fill(dw, dw + width, 0.f);
  std::fill(db, db + width, 0.f);
  for (long i = 0; i < rows; ++i, dy += width, x += width, dx += width) {
    float mean = means[i], invstd = invstds[i];
    double plain = 0, along = 0;
    for (long j = 0; j < width; ++j) {
      float normed = (x[j] - mean) * invstd, scaled = w ? dy[j] * w[j] : dy[j];
      plain += scaled;
      along += scaled * normed;
      dw[j] += dy[j] * normed;
      db[j] += dy[j];
    }
    float k0 = float(plain / width), k1 = float(along / width);
    for (long j = 0; j < width; ++j) dx[j] = ((w ? dy[j] * w[j] : dy[j]) - k0 - (x[j] - mean) * invstd * k1) * invstd;
  }
}

// --- attention --------------------------------------------------------------------------------------------------------

struct Heads {  // [..., queries, d] by [..., keys, d], values [..., keys, e]
  long heads, queries, keys, d, e;
  Heads(const Tensor& q, const Tensor& k, const Tensor& v)
      : queries(q.size(q.dim() - 2)), keys(k.size(k.dim() - 2)), d(q.size(q.dim() - 1)), e(v.size(v.dim() - 1)) {
    heads = q.numel() / std::max(1L, queries * d);
  }
  long seen(long query, bool causal) const { return causal ? std::min(query + 1, keys) : keys; }
};

// What queries see, as booleans, or what is added to their scores; of size 1 along some dimensions, or none at all.
struct Mask {
  const bool* seen = nullptr;
  const float* added = nullptr;
  std::vector<long> sizes, steps;  // of the dimensions before the last two: the weights' sizes, and elements in the mask
  long by_query = 0, by_key = 0;

  Mask(const Arguments& a, int at, const Tensor& q) {
    if (a.values[at]->isNone()) return;
    const Tensor& m = a.tensor(at);
    if (m.scalar_type() == executorch::aten::ScalarType::Bool) seen = m.const_data_ptr<bool>();
    else added = m.const_data_ptr<float>();
    long step = 1, dims = q.dim();
    sizes.assign(size_t(dims - 2), 1), steps.assign(size_t(dims - 2), 0);
    for (long i = 0; i < dims - 2; ++i) sizes[i] = q.size(i);
    for (long i = dims - 1, j = m.dim() - 1; j >= 0 && i >= 0; --i, --j) {
      long own = m.size(j) == 1 ? 0 : step;
      if (i == dims - 1) by_key = own;
      else if (i == dims - 2) by_query = own;
      else steps[i] = own;
      step *= m.size(j);
    }
  }
  // of head n in the order of the queries' dimensions
  long start(long n) const {
    long at = 0;
    for (long i = long(sizes.size()) - 1; i >= 0; n /= sizes[i], --i) at += n % sizes[i] * steps[i];
    return at;
  }
  void apply(float* row, long from, long count) const {
    for (long j = 0; seen && j < count; ++j)
      if (!seen[from + j * by_key]) row[j] = -std::numeric_limits<float>::infinity();
    for (long j = 0; added && j < count; ++j) row[j] += added[from + j * by_key];
  }
};

void weights_row(float* row, const float* q, const float* k, long count, long d, float scale, const Mask& mask, long from) {
  for (long j = 0; j < count; ++j) row[j] = dot(q, k + j * d, d) * scale;
  mask.apply(row, from, count);
  if (*std::max_element(row, row + count) == -std::numeric_limits<float>::infinity())
    std::fill(row, row + count, 0.f);  // a query that sees nothing
  else
    softmax_row(row, count);
}

// q, k, v, mask, causal, scale -> out; a row of weights at a time
void attention(Arguments a) {
  Heads h(a.tensor(0), a.tensor(1), a.tensor(2));
  const float *q = a.floats(0), *k = a.floats(1), *v = a.floats(2);
  Mask mask(a, 3, a.tensor(0));
  bool causal = a.boolean(4);
  float scale = float(a.real(5));
  auto given = a.tensor(0).sizes();
  std::vector<executorch::aten::SizesType> sizes(given.begin(), given.end());
  sizes.back() = h.e;
  float *out = a.result(6, sizes.data(), sizes.size()), *row = room(h.keys);
  if (!out) return;
  for (long n = 0; n < h.heads; ++n, k += h.keys * h.d, v += h.keys * h.e)
    for (long i = 0; i < h.queries; ++i, q += h.d, out += h.e) {
      long count = h.seen(i, causal);
      weights_row(row, q, k, count, h.d, scale, mask, mask.start(n) + i * mask.by_query);
      std::fill(out, out + h.e, 0.f);
      for (long j = 0; j < count; ++j) add_scaled(out, v + j * h.e, row[j], h.e);
    }
}

// dy, q, k, v, mask, causal, scale -> dq, dk, dv; dq may lie on dy or q
void attention_backward(Arguments a) {
  Heads h(a.tensor(1), a.tensor(2), a.tensor(3));
  const float *dy = a.floats(0), *q = a.floats(1), *k = a.floats(2), *v = a.floats(3);
  Mask mask(a, 4, a.tensor(1));
  bool causal = a.boolean(5);
  float scale = float(a.real(6));
  float *dq = a.like(7, 1), *dk = a.like(8, 2), *dv = a.like(9, 3), *row = room(2 * h.keys + h.d), *by = row + h.keys;
  if (!dq || !dk || !dv) return;
  float* own = by + h.keys;  // of one query, until nothing needs dy or q any more
  std::fill(dk, dk + h.heads * h.keys * h.d, 0.f);
  std::fill(dv, dv + h.heads * h.keys * h.e, 0.f);
  for (long n = 0; n < h.heads; ++n, k += h.keys * h.d, v += h.keys * h.e, dk += h.keys * h.d, dv += h.keys * h.e)
    for (long i = 0; i < h.queries; ++i, q += h.d, dy += h.e, dq += h.d) {
      long count = h.seen(i, causal);
      weights_row(row, q, k, count, h.d, scale, mask, mask.start(n) + i * mask.by_query);
      for (long j = 0; j < count; ++j) by[j] = dot(dy, v + j * h.e, h.e);
      float along = dot(row, by, count);
      std::fill(own, own + h.d, 0.f);
      for (long j = 0; j < count; ++j) {
        float score = row[j] * (by[j] - along) * scale;
        add_scaled(dv + j * h.e, dy, row[j], h.e);
        add_scaled(dk + j * h.d, q, score, h.d);
        add_scaled(own, k + j * h.d, score, h.d);
      }
      memcpy(dq, own, h.d * sizeof(float));
    }
}

// --- pools ------------------------------------------------------------------------------------------------------------

struct Window {  // of one place of the output: what it sees of the input, and over how many it is the mean
  long y0, y1, x0, x1, area;
  Window(long y, long x, ArrayRef<int64_t> k, ArrayRef<int64_t> s, ArrayRef<int64_t> p, long h, long w, bool count_pad) {
    y0 = y * s[0] - p[0], x0 = x * s[1] - p[1];
    y1 = std::min<long>(y0 + k[0], h + p[0]), x1 = std::min<long>(x0 + k[1], w + p[1]);
    area = (y1 - y0) * (x1 - x0);
    y0 = std::max(y0, 0L), x0 = std::max(x0, 0L), y1 = std::min(y1, h), x1 = std::min(x1, w);
    if (!count_pad) area = (y1 - y0) * (x1 - x0);
  }
};

// x, kernel, stride, padding, count_pad -> out
void avg_pool2d(Arguments a) {
  auto k = a.list(1), s = a.list(2), p = a.list(3);
  long n = a.size(0, 0), c = a.size(0, 1), h = a.size(0, 2), w = a.size(0, 3);
  long oh = (h + 2 * p[0] - k[0]) / s[0] + 1, ow = (w + 2 * p[1] - k[1]) / s[1] + 1;
  const float* x = a.floats(0);
  float* out = a.result(5, {n, c, oh, ow});
  if (!out) return;
  for (long q = 0; q < n * c; ++q, x += h * w)
    for (long y = 0; y < oh; ++y)
      for (long z = 0; z < ow; ++z) {
        Window v(y, z, k, s, p, h, w, a.boolean(4));
        float sum = 0;
        for (long i = v.y0; i < v.y1; ++i)
          for (long j = v.x0; j < v.x1; ++j) sum += x[i * w + j];
        *out++ = sum / v.area;
      }
}

// dy, height, width, kernel, stride, padding, count_pad -> dx
void avg_pool2d_backward(Arguments a) {
  auto k = a.list(3), s = a.list(4), p = a.list(5);
  long n = a.size(0, 0), c = a.size(0, 1), oh = a.size(0, 2), ow = a.size(0, 3), h = a.integer(1), w = a.integer(2);
  const float* dy = a.floats(0);
  float* out = a.result(7, {n, c, h, w});
  if (!out) return;
  std::fill(out, out + n * c * h * w, 0.f);
  for (long q = 0; q < n * c; ++q, out += h * w)
    for (long y = 0; y < oh; ++y)
      for (long z = 0; z < ow; ++z) {
        Window v(y, z, k, s, p, h, w, a.boolean(6));
        float share = *dy++ / v.area;
        for (long i = v.y0; i < v.y1; ++i)
          for (long j = v.x0; j < v.x1; ++j) out[i * w + j] += share;
      }
}

// x, kernel, stride, padding, dilation -> out, and where in its plane each comes from
void max_pool2d(Arguments a) {
  auto k = a.list(1), s = a.list(2), p = a.list(3), d = a.list(4);
  long n = a.size(0, 0), c = a.size(0, 1), h = a.size(0, 2), w = a.size(0, 3);
  long oh = (h + 2 * p[0] - d[0] * (k[0] - 1) - 1) / s[0] + 1, ow = (w + 2 * p[1] - d[1] * (k[1] - 1) - 1) / s[1] + 1;
  const float* x = a.floats(0);
  float* out = a.result(5, {n, c, oh, ow});
  int64_t* at = a.result<int64_t>(6, {n, c, oh, ow});
  if (!out || !at) return;
  for (long q = 0; q < n * c; ++q, x += h * w)
    for (long y = 0; y < oh; ++y)
      for (long z = 0; z < ow; ++z) {
        float most = -std::numeric_limits<float>::infinity();
        long found = -1;
        for (long i = 0; i < k[0]; ++i)
          for (long j = 0; j < k[1]; ++j) {
            long iy = y * s[0] - p[0] + i * d[0], ix = z * s[1] - p[1] + j * d[1];
            if (iy < 0 || iy >= h || ix < 0 || ix >= w) continue;
            float value = x[iy * w + ix];
            if (found < 0 || value > most || value != value) most = value, found = iy * w + ix;
          }
        *out++ = most;
        *at++ = std::max(found, 0L);
      }
}

// dy, at, height, width -> dx
void max_pool2d_backward(Arguments a) {
  long n = a.size(0, 0), c = a.size(0, 1), pixels = a.size(0, 2) * a.size(0, 3), h = a.integer(2), w = a.integer(3);
  const float* dy = a.floats(0);
  const int64_t* at = a.tensor(1).const_data_ptr<int64_t>();
  float* out = a.result(4, {n, c, h, w});
  if (!out) return;
  std::fill(out, out + n * c * h * w, 0.f);
  for (long q = 0; q < n * c; ++q, out += h * w, dy += pixels, at += pixels)
    for (long i = 0; i < pixels; ++i)
      if (at[i] >= 0 && at[i] < h * w) out[at[i]] += dy[i];
}

void spatial_mean(Arguments a) {
  Planes v(a.tensor(0));
  const float* x = a.floats(0);
  float* out = a.result(1, {v.n, v.c});
  if (!out) return;
  for (long q = 0; q < v.n * v.c; ++q) {
    float s = 0;
    for (long i = 0; i < v.p; ++i) s += x[q * v.p + i];
    out[q] = s / v.p;
  }
}

// dy [n, c], height, width -> dx
void spatial_mean_backward(Arguments a) {
  long n = a.size(0, 0), c = a.size(0, 1), h = a.integer(1), w = a.integer(2);
  const float* dy = a.floats(0);
  float* out = a.result(3, {n, c, h, w});
  if (!out) return;
  for (long q = 0; q < n * c; ++q) std::fill(out + q * h * w, out + (q + 1) * h * w, dy[q] / (h * w));
}

// --- parts of a dimension ---------------------------------------------------------------------------------------------

struct Parts {  // a tensor as [outer, size, inner]
  long outer = 1, inner = 1;
  std::vector<executorch::aten::SizesType> sizes;
  Parts(const Tensor& x, long dim) : sizes(x.sizes().begin(), x.sizes().end()) {
    for (long i = 0; i < long(sizes.size()); ++i) (i < dim ? outer : inner) *= i == dim ? 1 : sizes[i];
  }
};

// x, dim, start, end, step -> out
void slice(Arguments a) {
  long dim = a.integer(1), start = a.integer(2), end = a.integer(3), step = a.integer(4);
  if (dim < 0 || dim >= a.tensor(0).dim() || start < 0 || end > a.size(0, dim) || start >= end || step < 1) {
    a.context.fail(Error::InvalidArgument);
    return;
  }
  Parts v(a.tensor(0), dim);
  long size = v.sizes[dim], taken = (end - start + step - 1) / step;
  v.sizes[dim] = taken;
  const float* x = a.floats(0);
  float* out = a.result(5, v.sizes.data(), v.sizes.size());
  if (!out) return;
  for (long o = 0; o < v.outer; ++o, x += size * v.inner)
    for (long i = 0; i < taken; ++i, out += v.inner) memcpy(out, x + (start + i * step) * v.inner, v.inner * sizeof(float));
}

// dy, dim, size, start, step -> dx
void slice_backward(Arguments a) {
  long dim = a.integer(1), size = a.integer(2), start = a.integer(3), step = a.integer(4);
  if (dim < 0 || dim >= a.tensor(0).dim() || start < 0 || step < 1 || start + (a.size(0, dim) - 1) * step >= size) {
    a.context.fail(Error::InvalidArgument);
    return;
  }
  Parts v(a.tensor(0), dim);
  long taken = v.sizes[dim];
  v.sizes[dim] = size;
  const float* dy = a.floats(0);
  float* out = a.result(5, v.sizes.data(), v.sizes.size());
  if (!out) return;
  std::fill(out, out + v.outer * size * v.inner, 0.f);
  for (long o = 0; o < v.outer; ++o, out += size * v.inner)
    for (long i = 0; i < taken; ++i, dy += v.inner) memcpy(out + (start + i * step) * v.inner, dy, v.inner * sizeof(float));
}

// --- the loss ---------------------------------------------------------------------------------------------------------

// scores [n, classes], labels [n] -> mean cross-entropy, gradient
void cross_entropy(Arguments a) {
  long n = a.size(0, 0), classes = a.size(0, 1);
  const float* x = a.floats(0);
  const int64_t* labels = a.tensor(1).const_data_ptr<int64_t>();
  float *loss = a.result(2, std::initializer_list<long>{}), *out = a.result(3, {n, classes});
  if (!loss || !out) return;
  double total = 0;
  for (long i = 0; i < n; ++i, x += classes, out += classes) {
    if (labels[i] < 0 || labels[i] >= classes) {
      a.context.fail(Error::InvalidArgument);
      return;
    }
    float most = *std::max_element(x, x + classes);
    double sum = 0;
    for (long j = 0; j < classes; ++j) sum += std::exp(double(x[j]) - most);
    total += most + std::log(sum) - x[labels[i]];
    for (long j = 0; j < classes; ++j)
      out[j] = float((std::exp(double(x[j]) - most) / sum - (j == labels[i])) / n);
  }
  *loss = float(total / n);
}

template <void (*F)(Arguments)>
void boxed(KernelRuntimeContext& context, Span<EValue*> values) {
  F(Arguments{context, values});
}

const Kernel KERNELS[] = {
    Kernel("strata::conv2d.out", boxed<conv2d>),
    Kernel("strata::conv2d_grad_input.out", boxed<conv2d_grad_input>),
    Kernel("strata::conv2d_grad_weight.out", boxed<conv2d_grad_weight>),
    Kernel("strata::channel_sum.out", boxed<channel_sum>),
    Kernel("strata::linear.out", boxed<linear>),
    Kernel("strata::linear_grad_input.out", boxed<linear_grad_input>),
    Kernel("strata::linear_grad_weight.out", boxed<linear_grad_weight>),
    Kernel("strata::row_sum.out", boxed<row_sum>),
    Kernel("strata::batch_norm.out", boxed<batch_norm>),
    Kernel("strata::batch_norm_backward.out", boxed<batch_norm_backward>),
    Kernel("strata::batch_norm_statistics.out", boxed<batch_norm_statistics>),
    Kernel("strata::normalise.out", boxed<normalise>),
    Kernel("strata::normalise_backward.out", boxed<normalise_backward>),
    Kernel("strata::relu.out", boxed<relu>),
    Kernel("strata::relu_backward.out", boxed<relu_backward>),
    Kernel("strata::clamp.out", boxed<clamp>),
    Kernel("strata::clamp_backward.out", boxed<clamp_backward>),
    Kernel("strata::avg_pool2d.out", boxed<avg_pool2d>),
    Kernel("strata::avg_pool2d_backward.out", boxed<avg_pool2d_backward>),
    Kernel("strata::max_pool2d.out", boxed<max_pool2d>),
    Kernel("strata::max_pool2d_backward.out", boxed<max_pool2d_backward>),
    Kernel("strata::spatial_mean.out", boxed<spatial_mean>),
    Kernel("strata::spatial_mean_backward.out", boxed<spatial_mean_backward>),
    Kernel("strata::gelu.out", boxed<gelu>),
    Kernel("strata::gelu_backward.out", boxed<gelu_backward>),
    Kernel("strata::silu.out", boxed<silu>),
    Kernel("strata::silu_backward.out", boxed<silu_backward>),
    Kernel("strata::softmax.out", boxed<softmax>),
    Kernel("strata::softmax_backward.out", boxed<softmax_backward>),
    Kernel("strata::layer_norm.out", boxed<layer_norm>),
    Kernel("strata::layer_norm_backward.out", boxed<layer_norm_backward>),
    Kernel("strata::attention.out", boxed<attention>),
    Kernel("strata::attention_backward.out", boxed<attention_backward>),
    Kernel("strata::slice.out", boxed<slice>),
    Kernel("strata::slice_backward.out", boxed<slice_backward>),
    Kernel("strata::dropout_mask.out", boxed<dropout_mask>),
    Kernel("strata::cross_entropy.out", boxed<cross_entropy>),
    Kernel("strata::add_to.out", boxed<add_to>),
};
}  // namespace

bool register_kernels() {
  static const bool done = executorch::runtime::register_kernels({KERNELS, std::size(KERNELS)}) == Error::Ok;
  return done;
}
size_t scratch_bytes() { return scratch.capacity() * sizeof(float); }
}  // namespace strata
