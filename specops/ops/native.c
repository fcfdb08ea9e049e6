/* Kernels for a few token rows on a CPU, in C that any compiler with GNU vector extensions takes.
 *
 * Compiled at first use and called through ctypes by native.py; nothing here knows of Python or torch. Weights and caches
 * are float32 or bfloat16 ("half" below) and are read where they lie; everything is computed in float32.
 *
 * A product reads each weight row once for up to TM token rows and is bound by memory. Every dot product adds its terms in
 * an order that depends on K alone, and attention cuts keys into blocks at fixed positions: a row's result does not depend
 * on the rows beside it nor on the number of threads, so a verified token is, bit for bit, the one plain decoding finds.
 *
 * Attention of requests of more than NARROW rows, prompts, does more with a key than read it, and turns each block of keys:
 * scores of 4 rows and 4 vectors of keys then take no sums across a vector. There a row's result depends on how many rows
 * its request has, and on no other request. Half values are widened to floats for products: on the processors measured the
 * instruction that multiplies pairs of halves is no faster, 11.9 us against 6.0 for 128 rows, 64 keys and 64 dims.
 */
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#define VL 16
#define TM 4
#elif defined(__AVX__)
#define VL 8
#define TM 2 /* 16 registers */
#else
#define VL 4
#define TM 4
#endif
#define KB 64      /* keys of a block of attention */
#define CHUNK 128  /* keys of an item of attention; a multiple of KB */
#define ROWS 64    /* query rows times heads of a group of an item, at most */
#define NARROW 64  /* query rows of a request, up to which a row's result is that of the row alone */
#define WIDE_ROWS 128 /* as ROWS, of a request with more rows */
#define MAX_DIM 256
#define TEAM_WORK (1 << 17) /* multiplications of attention from which a team pays */

typedef float vf __attribute__((vector_size(VL * 4)));
typedef float vfu __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
typedef uint32_t vuu __attribute__((vector_size(VL * 4), aligned(2), may_alias));
#define INLINE static inline __attribute__((always_inline))

INLINE float widen(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}

INLINE uint16_t narrow(float value) { /* to nearest, ties to even; NaN stays NaN */
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if (value != value) return 0x7fc0;
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE float get(const void *p, long i, int half) { return half ? widen(((const uint16_t *)p)[i]) : ((const float *)p)[i]; }

INLINE void put(void *p, long i, float value, int half) {
  if (half) ((uint16_t *)p)[i] = narrow(value);
  else ((float *)p)[i] = value;
}

INLINE float sum_of(vf v) {
  for (int step = VL / 2; step > 0; step /= 2)
    for (int i = 0; i < step; i++) v[i] += v[i + step];
  return v[0];
}

#if defined(__AVX512F__)
/* Sums of 16 vectors: of fold[i] in lane 4 (i % 4) + i / 4. */
INLINE __m512 folded(__m512 *fold) {
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    __m512 a = fold[2 * i], b = fold[2 * i + 1];
    fold[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    __m512 a = fold[2 * i], b = fold[2 * i + 1];
    fold[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {
    __m512 a = fold[2 * i], b = fold[2 * i + 1];
    fold[i] = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
  }
  return _mm512_add_ps(_mm512_shuffle_ps(fold[0], fold[1], 0x88), _mm512_shuffle_ps(fold[0], fold[1], 0xdd));
}
#endif

/* Sums of up to 16 vectors, each in the order of sum_of: out[i] of acc[i]. */
INLINE void sums(const vf *acc, int count, float *out) {
#if defined(__AVX512F__)
  __m512 fold[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) fold[i] = i < count ? (__m512)acc[i] : _mm512_setzero_ps();
  float mixed[16];
  _mm512_storeu_ps(mixed, folded(fold));
#pragma GCC unroll 16
  for (int i = 0; i < count; i++) out[i] = mixed[4 * (i % 4) + i / 4];
#else
  for (int i = 0; i < count; i++) out[i] = sum_of(acc[i]);
#endif
}

INLINE vf pick(vi mask, vf a, vf b) { return (vf)(((vi)a & mask) | ((vi)b & ~mask)); }

INLINE vf splat(float value) { return value - (vf){0}; }

/* exp to about 2 ulp; 0 below -87, NaN for NaN. */
INLINE vf exp_of(vf x) {
  const vf shift = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to a whole number */
#if defined(__AVX512F__)
  const __mmask16 there = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
  vf z = (vf)_mm512_min_ps(_mm512_set1_ps(88.0f), (__m512)x); /* the second where one is NaN */
#else
  vi tiny = x < splat(-87.0f);
  vf z = pick(x > splat(88.0f), splat(88.0f), pick(tiny, splat(-87.0f), x));
#endif
  vf n = (z * splat(1.44269504f) + shift) - shift;
  vf r = z - n * splat(0.693359375f) - n * splat(-2.12194440e-4f);
  vf p = splat(1.9875691500e-4f);
  p = p * r + splat(1.3981999507e-3f);
  p = p * r + splat(8.3334519073e-3f);
  p = p * r + splat(4.1665795894e-2f);
  p = p * r + splat(1.6666665459e-1f);
  p = p * r + splat(5.0000001201e-1f);
  p = p * r * r + r + splat(1.0f);
#if defined(__AVX512F__)
  return (vf)_mm512_maskz_scalef_ps(there, (__m512)p, (__m512)n);
#else
  vi exponent = (__builtin_convertvector(n, vi) + 127) << 23;
  return pick(tiny, (vf){0}, p * (vf)exponent);
#endif
}

/* Products ------------------------------------------------------------------------------------------------------- */

/* Token rows are float32; for half weights each group of 2 VL elements has its even ones first, as a load splits them. */
INLINE void spread(float *row, long K) {
  float buffer[2 * VL];
  for (long k = 0; k + 2 * VL <= K; k += 2 * VL) {
    memcpy(buffer, row + k, sizeof buffer);
    for (int i = 0; i < VL; i++) row[k + i] = buffer[2 * i], row[k + VL + i] = buffer[2 * i + 1];
  }
}

INLINE long least(long a, long b) { return a < b ? a : b; }
INLINE long most(long a, long b) { return a > b ? a : b; }

/* Where a product goes: out[m, n] = sum + bias[n] + residual[m, n], in float32 or the weights' dtype. */
typedef struct {
  void *out;
  long ld;
  const void *bias, *residual;
  int wide, residual_wide;
} Target;

INLINE void emit(const Target *to, long m, long n, float value, int half) {
  if (to->bias) value += get(to->bias, n, half);
  if (to->residual) value += get(to->residual, m * to->ld + n, half && !to->residual_wide);
  put(to->out, m * to->ld + n, value, half && !to->wide);
}

/* A weight is read once, in tiles of rows behind one another: the next tile is fetched to the first cache, and with more
 * token rows than one the fourth from here to the second. Took 5% off 4 rows and 10% off 6 and 8. */
INLINE void ahead(const char *p, long tile_bytes, int lone, int first) {
  if (lone || first) __builtin_prefetch(p + tile_bytes);
  if (!lone && first) __builtin_prefetch(p + 4 * tile_bytes, 0, 2);
}

INLINE void tile(const float *x, const char *w, long K, int half, int mb, int nb, const Target *to, long m0, long n0) {
  const long ldw = K * (half ? 2 : 4);
  vf acc[16];
  float out[16];
  long k = 0;
#pragma GCC unroll 16
  for (int i = 0; i < mb * nb; i++) acc[i] = (vf){0};
  if (!half) {
    for (; k + VL <= K; k += VL) {
      vf wv[8];
#pragma GCC unroll 8
      for (int n = 0; n < nb; n++) {
        const float *p = (const float *)(w + n * ldw) + k;
        wv[n] = *(const vfu *)p;
        ahead((const char *)p, nb * ldw, nb == 8, m0 == 0);
      }
#pragma GCC unroll 4
      for (int m = 0; m < mb; m++) {
        vf xv = *(const vfu *)(x + m * K + k);
#pragma GCC unroll 8
        for (int n = 0; n < nb; n++) acc[m * nb + n] += xv * wv[n];
      }
    }
  } else {
    for (; k + 2 * VL <= K; k += 2 * VL) {
      vu wv[8];
#pragma GCC unroll 8
      for (int n = 0; n < nb; n++) {
        const uint16_t *p = (const uint16_t *)(w + n * ldw) + k;
        wv[n] = *(const vuu *)p;
        ahead((const char *)p, nb * ldw, nb == 8, m0 == 0);
      }
#pragma GCC unroll 4
      for (int m = 0; m < mb; m++) {
        vf even = *(const vfu *)(x + m * K + k), odd = *(const vfu *)(x + m * K + k + VL);
#pragma GCC unroll 8
        for (int n = 0; n < nb; n++) {
          acc[m * nb + n] += even * (vf)(wv[n] << 16);
          acc[m * nb + n] += odd * (vf)(wv[n] & 0xffff0000u);
        }
      }
    }
  }
  sums(acc, mb * nb, out);
#pragma GCC unroll 4
  for (int m = 0; m < mb; m++)
#pragma GCC unroll 8
    for (int n = 0; n < nb; n++) {
      float total = out[m * nb + n];
      for (long t = k; t < K; t++) total += x[m * K + t] * get(w + n * ldw, t, half);
      emit(to, m0 + m, n0 + n, total, half);
    }
}

INLINE void tiles(const float *x, const char *w, long M, long K, int half, int nb, const Target *to, long n) {
  long m = 0;
  for (; m + TM <= M; m += TM) tile(x + m * K, w, K, half, TM, nb, to, m, n);
#if TM > 2
  if (M - m == 3) tile(x + m * K, w, K, half, 3, nb, to, m, n);
  if (M - m == 2) tile(x + m * K, w, K, half, 2, nb, to, m, n);
#endif
  if (M - m == 1) tile(x + m * K, w, K, half, 1, nb, to, m, n);
}

/* Columns n0 to n1 of x [M, K] times weight [N, K]. */
INLINE void product_of(const float *x, const char *w, long M, long K, long n0, long n1, int half, const Target *to) {
  const long ldw = K * (half ? 2 : 4);
  long n = n0;
  if (M == 1)
    for (; n + 8 <= n1; n += 8) tile(x, w + n * ldw, K, half, 1, 8, to, 0, n);
  for (; n + 4 <= n1; n += 4) tiles(x, w + n * ldw, M, K, half, 4, to, n);
  for (; n < n1; n++) tiles(x, w + n * ldw, M, K, half, 1, to, n);
}

static void product(const float *x, const void *w, long M, long K, long n0, long n1, int half, const Target *to) {
  if (half) product_of(x, w, M, K, n0, n1, 1, to);
  else product_of(x, w, M, K, n0, n1, 0, to);
}

/* This thread's share of n columns, in whole groups of 8. */
INLINE void share(long n, long *first, long *last) {
  long thread = omp_get_thread_num(), threads = omp_get_num_threads(), groups = (n + 7) / 8;
  *first = groups * thread / threads * 8;
  *last = groups * (thread + 1) / threads * 8;
  if (*last > n) *last = n;
}

/* A team costs a microsecond or two; below this many multiplications one thread is faster. */
INLINE int team(long work, int threads) { return work < 1 << 15 ? 1 : threads; }

static void load_rows(const void *x, long M, long K, int half, float *rows) {
  for (long i = 0; i < M * K; i++) rows[i] = get(x, i, half);
  if (half)
    for (long m = 0; m < M; m++) spread(rows + m * K, K);
}

/* y [M, N] = x [M, K] times weight [N, K] transposed, plus bias. work: M * K floats. */
void specops_linear(const void *x, const void *weight, const void *bias, void *y, long M, long N, long K, int half,
                    float *work, int threads) {
  const float *rows = x;
  Target to = {y, N, bias, NULL, 0, 0};
  if (half) {
    load_rows(x, M, K, half, work);
    rows = work;
  }
#pragma omp parallel num_threads(team(M * N * K, threads))
  {
    long first, last;
    share(N, &first, &last);
    product(rows, weight, M, K, first, last, half, &to);
  }
}

/* A decoder layer around its attention --------------------------------------------------------------------------- */

/* Weights of one layer; NULL for what it lacks. Field order as in native.py. */
typedef struct {
  const void *input_norm, *qkv, *qkv_bias, *qk_norm, *o, *o_bias, *mlp_norm, *gate_up, *gate_up_bias, *down, *down_bias;
  int64_t input, hidden, heads, kv_heads, dim, inner, half;
  double eps, offset;
} Layer;

/* RMSNorm of one row; weight and offset as in models/llama.py. */
static void rms_norm(const float *x, const void *weight, long K, double eps, double offset, int half, float *out) {
  vf total = {0};
  long k = 0;
  for (; k + VL <= K; k += VL) total += *(const vfu *)(x + k) * *(const vfu *)(x + k);
  float square = sum_of(total);
  for (; k < K; k++) square += x[k] * x[k];
  float scale = 1.0f / sqrtf(square / (float)K + (float)eps);
  if (half)
    for (k = 0; k < K; k++) out[k] = x[k] * scale * (widen(((const uint16_t *)weight)[k]) + (float)offset);
  else
    for (k = 0; k < K; k++) out[k] = x[k] * scale * (((const float *)weight)[k] + (float)offset);
}

/* Norm, projections of q, k and v, their norm and rotation, and the write of k and v into the cache.
 *
 * x [T, input]; cos and sin [T, dim / 2] in the layer's dtype; slots [T]; q [T, heads, dim]. Strides of the caches are in
 * elements: of a page, a token, a head. work: T * (input + qkv columns) floats. */
void specops_layer_in(const Layer *layer, const void *x, long T, const void *cos, const void *sin, const int64_t *slots,
                      void *q, void *k_cache, void *v_cache, const int64_t *strides, long page_size, float *work,
                      int threads) {
  const long heads = layer->heads, kv = layer->kv_heads, dim = layer->dim, K = layer->input, pairs = dim / 2;
  const long N = (heads + 2 * kv) * dim;
  const int half = (int)layer->half;
  float *rows = work, *qkv = work + T * K;
  for (long t = 0; t < T; t++) {
    for (long k = 0; k < K; k++) rows[t * K + k] = get(x, t * K + k, half);
    if (layer->input_norm) rms_norm(rows + t * K, layer->input_norm, K, layer->eps, layer->offset, half, rows + t * K);
    if (half) spread(rows + t * K, K);
  }
  const Target to = {qkv, N, layer->qkv_bias, NULL, 1, 0};
#pragma omp parallel num_threads(team(T * N * K, threads))
  {
    long first, last;
    share(N, &first, &last);
    product(rows, layer->qkv, T, K, first, last, half, &to);
#pragma omp barrier
#pragma omp for schedule(static) nowait
    for (long i = 0; i < T * (heads + 2 * kv); i++) {
      const long t = i / (heads + 2 * kv), head = i % (heads + 2 * kv);
      const int64_t slot = slots[t];
      float *row = qkv + t * N + head * dim;
      void *to_row = q;
      long at = (t * heads + head) * dim;
      if (head >= heads) {
        const int is_v = head >= heads + kv;
        const int64_t *stride = strides + (is_v ? 3 : 0);
        if (slot < 0) continue;
        to_row = is_v ? v_cache : k_cache;
        at = slot / page_size * stride[0] + slot % page_size * stride[1] + (head - heads - (is_v ? kv : 0)) * stride[2];
      }
      if (head < heads + kv) {
        if (layer->qk_norm)
          rms_norm(row, (const char *)layer->qk_norm + head * dim * (half ? 2 : 4), dim, layer->eps, layer->offset, half,
                   row);
        for (long d = 0; d < pairs; d++) {
          const float c = get(cos, t * pairs + d, half), s = get(sin, t * pairs + d, half);
          const float a = row[d], b = row[d + pairs];
          row[d] = a * c - b * s;
          row[d + pairs] = b * c + a * s;
        }
      }
      for (long d = 0; d < dim; d++) put(to_row, at + d, row[d], half);
    }
  }
}

/* Output projection, residual, and the gated MLP with its norm and residual.
 *
 * attended [T, heads * dim]; residual and out [T, hidden].
 * work: T * (heads * dim + 2 hidden + 3 inner) floats. */
void specops_layer_out(const Layer *layer, const void *attended, const void *residual, void *out, long T, float *work,
                       int threads) {
  const long A = layer->heads * layer->dim, H = layer->hidden, inner = layer->inner;
  const int half = (int)layer->half;
  float *mixed = work, *stream = mixed + T * A, *normed = stream + T * H, *gate = normed + T * H;
  float *up = gate + T * inner, *act = half ? up + T * inner : gate;
  const float *rows = attended;
  if (half) {
    load_rows(attended, T, A, half, mixed);
    rows = mixed;
  }
  const Target to_stream = {stream, H, layer->o_bias, residual, 1, 0};
  const char *bias = layer->gate_up_bias;
  const long size = half ? 2 : 4;
  const Target to_gate = {gate, inner, bias, NULL, 1, 0};
  const Target to_up = {up, inner, bias ? bias + inner * size : NULL, NULL, 1, 0};
  const Target to_out = {out, H, layer->down_bias, stream, 0, 1};
#pragma omp parallel num_threads(team(T * H * inner, threads))
  {
    long first, last;
    share(H, &first, &last);
    product(rows, layer->o, T, A, first, last, half, &to_stream);
#pragma omp barrier
#pragma omp for schedule(static)
    for (long t = 0; t < T; t++) {
      rms_norm(stream + t * H, layer->mlp_norm, H, layer->eps, layer->offset, half, normed + t * H);
      if (half) spread(normed + t * H, H);
    }
    share(inner, &first, &last);
    product(normed, layer->gate_up, T, H, first, last, half, &to_gate);
    product(normed, (const char *)layer->gate_up + inner * H * size, T, H, first, last, half, &to_up);
    for (long t = 0; t < T; t++) {
      float *g = gate + t * inner, *u = up + t * inner;
      long i = first;
      for (; i + VL <= last; i += VL) {
        vf x = *(const vfu *)(g + i);
        *(vfu *)(g + i) = x / (exp_of(-x) + 1.0f) * *(const vfu *)(u + i);
      }
      for (; i < last; i++) g[i] = g[i] / (1.0f + expf(-g[i])) * u[i];
      if (half) {
        const long whole = inner / (2 * VL) * (2 * VL);
        for (i = first; i < last; i++)
          act[t * inner + (i < whole ? i / (2 * VL) * (2 * VL) + i % (2 * VL) / 2 + (i & 1) * VL : i)] = g[i];
      }
    }
#pragma omp barrier
    share(H, &first, &last);
    product(act, layer->down, T, inner, first, last, half, &to_out);
  }
}

/* Attention ------------------------------------------------------------------------------------------------------ */

/* Field order as in native.py. What changes from call to call comes first, then what changes from step to step, then what
 * stays a layer's. Strides are in elements; out is [rows, heads, value_dim]. */
typedef struct {
  const char *q;
  char *out;
  int64_t q_row, q_head, rows;
  const int32_t *table, *seq_lens, *query_start; /* query_start NULL: uniform rows */
  int64_t table_row, batch, width, max_pages;
  const char *k, *v;
  const float *sinks;
  const uint8_t *tree;
  int64_t tree_row, tree_width;
  int64_t k_page, k_slot, k_head, v_page, v_slot, v_head;
  int64_t heads, kv_heads, dim, value_dim, page_size, window, half;
  double scale, softcap;
} Attention;

/* Some rows of one request, one KV head, and the keys of one chunk; a wide item has all keys of its rows. */
typedef struct {
  int32_t request, kv_head, first_row, num_rows, chunk, num_chunks, wide;
  int64_t partial;
} Item;

/* Accumulators of half values have, in each group of 2 VL elements, the even ones first, as a load splits them; a last
 * group of VL keeps its order. */
INLINE vf evens(vu pair) { return (vf)(pair << 16); }
INLINE vf odds(vu pair) { return (vf)(pair & 0xffff0000u); }

typedef uint16_t vs __attribute__((vector_size(VL * 2)));
typedef uint16_t vsu __attribute__((vector_size(VL * 2), aligned(2), may_alias));
INLINE vf widened(const uint16_t *p) { return (vf)(__builtin_convertvector((vs) * (const vsu *)p, vu) << 16); }

INLINE vu narrowed(vf value) { /* as narrow(), in the upper halves */
  vu bits = (vu)value;
  vu rounded = bits + 0x7fff + ((bits >> 16) & 1);
  vu plain = (vu)(value == value);
  return (rounded & plain) | (0x7fc00000u & ~plain);
}

/* The larger of two, b where a is NaN. */
INLINE vf larger(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return pick(a > b, a, b);
#endif
}

INLINE float largest_of(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float best = v[0];
  for (int i = 1; i < VL; i++) best = v[i] > best ? v[i] : best;
  return best;
#endif
}

/* Scores of up to TM query rows with up to 4 keys. Rows are floats; for half keys they are spread(). */
INLINE void dots(const float *q, long dim, const char *const *keys, int half, int mb, int nb, float *scores) {
  vf acc[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) acc[i] = (vf){0};
  long d = 0;
  if (half)
    for (; d + 2 * VL <= dim; d += 2 * VL) {
      vu both[4];
#pragma GCC unroll 4
      for (int n = 0; n < nb; n++) both[n] = *(const vuu *)((const uint16_t *)keys[n] + d);
#pragma GCC unroll 4
      for (int m = 0; m < mb; m++) {
        vf even = *(const vfu *)(q + m * dim + d), odd = *(const vfu *)(q + m * dim + d + VL);
#pragma GCC unroll 4
        for (int n = 0; n < nb; n++) {
          acc[n * 4 + m] += even * evens(both[n]);
          acc[n * 4 + m] += odd * odds(both[n]);
        }
      }
    }
  for (; d < dim; d += VL) {
    vf kv[4];
#pragma GCC unroll 4
    for (int n = 0; n < nb; n++)
      if (half) kv[n] = widened((const uint16_t *)keys[n] + d);
      else kv[n] = *(const vfu *)((const float *)keys[n] + d);
#pragma GCC unroll 4
    for (int m = 0; m < mb; m++) {
      vf qv = *(const vfu *)(q + m * dim + d);
#pragma GCC unroll 4
      for (int n = 0; n < nb; n++) acc[n * 4 + m] += qv * kv[n];
    }
  }
#if defined(__AVX512F__)
  __m512 fold[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) fold[i] = (__m512)acc[i];
  const __m512 all = folded(fold); /* row m's four in the m-th quarter */
  __m128 rows[4] = {_mm512_castps512_ps128(all), _mm512_extractf32x4_ps(all, 1), _mm512_extractf32x4_ps(all, 2),
                    _mm512_extractf32x4_ps(all, 3)};
#pragma GCC unroll 4
  for (int m = 0; m < mb; m++)
    if (nb == 4) _mm_storeu_ps(scores + m * KB, rows[m]);
    else scores[m * KB] = _mm_cvtss_f32(rows[m]);
#else
#pragma GCC unroll 4
  for (int m = 0; m < mb; m++)
#pragma GCC unroll 4
    for (int n = 0; n < nb; n++) scores[m * KB + n] = sum_of(acc[n * 4 + m]);
#endif
}

INLINE void all_dots(const float *q, long R, long dim, const char *const *keys, int half, int nb, float *scores) {
  long r = 0;
  for (; r + TM <= R; r += TM) dots(q + r * dim, dim, keys, half, TM, nb, scores + r * KB);
#if TM > 2
  if (R - r == 3) dots(q + r * dim, dim, keys, half, 3, nb, scores + r * KB);
  if (R - r == 2) dots(q + r * dim, dim, keys, half, 2, nb, scores + r * KB);
#endif
  if (R - r == 1) dots(q + r * dim, dim, keys, half, 1, nb, scores + r * KB);
}

/* Keys of a block, turned: element d of key j goes to turned[d * KB + j]. */
INLINE void turn(const char *const *keys, long count, long dim, float *turned) {
  long j = 0;
#if defined(__AVX512F__)
  for (; j + 16 <= count; j += 16)
    for (long d = 0; d < dim; d += 16) {
      __m512i a[16], b[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512((const float *)keys[j + i] + d);
#pragma GCC unroll 8
      for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
      }
#pragma GCC unroll 4
      for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
      }
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
        b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
        b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
        b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
      }
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        _mm512_storeu_si512(turned + (d + i) * KB + j, _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88));
        _mm512_storeu_si512(turned + (d + i + 4) * KB + j, _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0x88));
        _mm512_storeu_si512(turned + (d + i + 8) * KB + j, _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd));
        _mm512_storeu_si512(turned + (d + i + 12) * KB + j, _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0xdd));
      }
    }
#endif
  for (; j < count; j++)
    for (long d = 0; d < dim; d++) turned[d * KB + j] = ((const float *)keys[j])[d];
}

/* How much of a block the query rows of an item see: row r, of line r / group, its first line + r / group keys. */
typedef struct {
  long first, group, keys;
} Sight;

INLINE int seen_by(const Sight *sight, long r) {
  long seen = sight->first + r / sight->group;
  return (int)(seen < 0 ? 0 : seen < sight->keys ? seen : sight->keys);
}

/* Scores of mb query rows with nb vectors of turned keys. */
INLINE void turned_dots(const float *q, long dim, const float *turned, int mb, int nb, float *scores) {
  vf acc[16];
#pragma GCC unroll 16
  for (int i = 0; i < mb * nb; i++) acc[i] = (vf){0};
  for (long d = 0; d < dim; d++) {
    vf kv[4];
#pragma GCC unroll 4
    for (int n = 0; n < nb; n++) kv[n] = *(const vfu *)(turned + d * KB + n * VL);
#pragma GCC unroll 4
    for (int m = 0; m < mb; m++) {
      const float qv = q[m * dim + d];
#pragma GCC unroll 4
      for (int n = 0; n < nb; n++) acc[m * nb + n] += kv[n] * qv;
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < mb * nb; i++) *(vfu *)(scores + i / nb * KB + i % nb * VL) = acc[i];
}

INLINE void all_turned_dots(const float *q, long R, long dim, const float *turned, const Sight *sight, float *scores) {
  for (long r = 0; r < R; r += TM) {
    const int whole = R - r >= TM, seen = seen_by(sight, least(R, r + TM) - 1);
    for (long m = r; m < least(R, r + TM); m += whole ? TM : 1) {
      int j = 0;
      for (; j + 3 * VL < seen; j += 4 * VL)
        if (whole) turned_dots(q + m * dim, dim, turned + j, TM, 4, scores + m * KB + j);
        else turned_dots(q + m * dim, dim, turned + j, 1, 4, scores + m * KB + j);
      for (; j + VL < seen; j += 2 * VL)
        if (whole) turned_dots(q + m * dim, dim, turned + j, TM, 2, scores + m * KB + j);
        else turned_dots(q + m * dim, dim, turned + j, 1, 2, scores + m * KB + j);
      if (j < seen) {
        if (whole) turned_dots(q + m * dim, dim, turned + j, TM, 1, scores + m * KB + j);
        else turned_dots(q + m * dim, dim, turned + j, 1, 1, scores + m * KB + j);
      }
    }
  }
}

/* acc[mb rows, nb vectors] += weights[mb rows, keys] times values. split: values are half, taken apart on the way. */
INLINE void mix(const float *weights, const char *const *values, long at, int keys, float *acc, long dim, int split, int mb,
                int nb) {
  vf sum[16];
#pragma GCC unroll 16
  for (int i = 0; i < mb * nb; i++) sum[i] = *(const vfu *)(acc + i / nb * dim + i % nb * VL);
  for (int j = 0; j < keys; j++) {
    vf value[4];
    if (split && nb == 1) value[0] = widened((const uint16_t *)values[j] + at);
    else if (split) {
#pragma GCC unroll 2
      for (int n = 0; n < nb; n += 2) {
        vu both = *(const vuu *)((const uint16_t *)values[j] + at + n * VL);
        value[n] = evens(both), value[n + 1] = odds(both);
      }
    } else {
#pragma GCC unroll 4
      for (int n = 0; n < nb; n++) value[n] = *(const vfu *)((const float *)values[j] + at + n * VL);
    }
#pragma GCC unroll 4
    for (int m = 0; m < mb; m++)
#pragma GCC unroll 4
      for (int n = 0; n < nb; n++) sum[m * nb + n] += value[n] * weights[m * KB + j];
  }
#pragma GCC unroll 16
  for (int i = 0; i < mb * nb; i++) *(vfu *)(acc + i / nb * dim + i % nb * VL) = sum[i];
}

INLINE void mix_rows(const float *weights, long R, const char *const *values, long at, const Sight *sight, float *acc,
                     long dim, int split, int nb) {
  for (long r = 0; r < R; r += TM) {
    const int keys = seen_by(sight, least(R, r + TM) - 1);
    const float *w = weights + r * KB;
    float *to = acc + r * dim;
    if (R - r >= TM) mix(w, values, at, keys, to, dim, split, TM, nb);
#if TM > 2
    else if (R - r == 3) mix(w, values, at, keys, to, dim, split, 3, nb);
    else if (R - r == 2) mix(w, values, at, keys, to, dim, split, 2, nb);
#endif
    else mix(w, values, at, keys, to, dim, split, 1, nb);
  }
}

INLINE void mix_all(const float *weights, long R, const char *const *values, const Sight *sight, float *acc, long dim,
                    int split) {
  long d = 0;
  for (; d + 4 * VL <= dim; d += 4 * VL) mix_rows(weights, R, values, d, sight, acc + d, dim, split, 4);
  for (; d + 2 * VL <= dim; d += 2 * VL) mix_rows(weights, R, values, d, sight, acc + d, dim, split, 2);
  for (; d < dim; d += VL) mix_rows(weights, R, values, d, sight, acc + d, dim, split, 1);
}

/* Where keys low to low + count of a request lie. */
INLINE void places(const char *cache, const int32_t *pages, long low, long count, long page_size, long page_stride,
                   long slot_stride, int half, const char **pointers) {
  const long size = half ? 2 : 4;
  long page = low / page_size, offset = low % page_size;
  const char *at = cache + (pages[page] * page_stride + offset * slot_stride) * size;
  for (long j = 0; j < count; j++) {
    pointers[j] = at;
    at += slot_stride * size;
    if (++offset == page_size && j + 1 < count) {
      offset = 0;
      at = cache + pages[++page] * page_stride * size;
    }
  }
}

/* First and last row of a request in q. */
INLINE void rows_of(const Attention *a, long request, long *first, long *count) {
  *first = a->query_start ? a->query_start[request] : request * a->width;
  *count = a->query_start ? a->query_start[request + 1] - *first : a->width;
}

/* Keys that rows first to first + num of a request can see: from *begin to *end. */
INLINE void reach_of(const Attention *a, long request, long first, long num, long *begin, long *end) {
  long start, count, len = a->seq_lens[request];
  rows_of(a, request, &start, &count);
  *begin = 0;
  *end = least(len, a->max_pages * a->page_size);
  if (a->tree) return;
  long position = len - count + first;
  *end = most(0, least(*end, position + num));
  if (a->window) *begin = most(0, position - a->window + 1);
}

INLINE void finish(const Attention *a, const float *acc, float top, float sum, long row, long head) {
  float scale = sum == 0 ? 0 : 1.0f / sum;
  if (a->sinks) {
    const float sink = a->sinks[head], all = top > sink ? top : sink;
    const float rest = top == -INFINITY ? 0 : expf(top - all);
    scale = rest / (sum * rest + expf(sink - all));
  }
  const long dim = a->value_dim;
  long d = 0;
  if (!a->half) {
    float *out = (float *)a->out + (row * a->heads + head) * dim;
    for (; d < dim; d += VL) *(vfu *)(out + d) = *(const vfu *)(acc + d) * splat(scale);
    return;
  }
  uint16_t *out = (uint16_t *)a->out + (row * a->heads + head) * dim;
  for (; d + 2 * VL <= dim; d += 2 * VL) {
    vf even = *(const vfu *)(acc + d) * splat(scale), odd = *(const vfu *)(acc + d + VL) * splat(scale);
    *(vuu *)(out + d) = (narrowed(even) >> 16) | (narrowed(odd) & 0xffff0000u);
  }
  for (; d < dim; d++) out[d] = narrow(acc[d] * scale);
}

/* A half row as floats, in the order of accumulators. */
INLINE void take_apart(const char *half_row, long dim, float *row) {
  const uint16_t *from = (const uint16_t *)half_row;
  long d = 0;
  for (; d + 2 * VL <= dim; d += 2 * VL) {
    vu both = *(const vuu *)(from + d);
    *(vfu *)(row + d) = evens(both), *(vfu *)(row + d + VL) = odds(both);
  }
  for (; d < dim; d += VL) *(vfu *)(row + d) = widened(from + d);
}

INLINE void fetch(const char *row, long bytes) {
  for (long i = 0; i < bytes; i += 64) __builtin_prefetch(row + i);
}

/* max_rows: query rows times heads of an item, at most. */
INLINE void attend(const Attention *a, const Item *item, float *partials, int half, int wide, int max_rows) {
  const long dim = a->dim, value_dim = a->value_dim, group = a->heads / a->kv_heads, request = item->request;
  const long R = item->num_rows * group, size = half ? 2 : 4;
  long begin, end, start, count;
  float q[max_rows * MAX_DIM], local[max_rows * (MAX_DIM + 2)], scores[max_rows * KB];
  float buffer[wide ? KB * MAX_DIM : 1], turned[wide ? KB * MAX_DIM : 1];
  vf sums_of_rows[max_rows];
  const char *keys[KB], *values[KB], *next[KB];
  rows_of(a, request, &start, &count);
  reach_of(a, request, item->first_row, item->num_rows, &begin, &end);
  const long position = a->seq_lens[request] - count + item->first_row, prefix = a->seq_lens[request] - a->tree_width;
  const int32_t *pages = a->table + request * a->table_row;
  const char *all_keys = a->k + item->kv_head * a->k_head * size, *all_values = a->v + item->kv_head * a->v_head * size;
  const long chunk = (begin / CHUNK + item->chunk) * CHUNK;
  const long from = wide ? begin : most(begin, chunk), to = wide ? end : least(end, chunk + CHUNK);
  long ahead_of = least(to, from / KB * KB + KB) - from;
  if (ahead_of > 0) places(all_keys, pages, from, ahead_of, a->page_size, a->k_page, a->k_slot, half, next);
  float *acc = item->num_chunks > 1 ? partials + item->partial : local;
  float *top = acc + R * value_dim, *sum = top + R;
  for (long r = 0; r < R; r++) {
    const long row = start + item->first_row + r / group, head = item->kv_head * group + r % group;
    const char *query = a->q + (row * a->q_row + head * a->q_head) * size;
    if (half) take_apart(query, dim, q + r * dim);
    const float *floats = half ? q + r * dim : (const float *)query;
    for (long d = 0; d < dim; d += VL) *(vfu *)(q + r * dim + d) = *(const vfu *)(floats + d) * splat((float)a->scale);
    top[r] = -INFINITY;
    sums_of_rows[r] = (vf){0};
  }
  memset(acc, 0, sizeof(float) * R * value_dim);
  for (long low = from; low < to;) {
    const long num = ahead_of, after = low + num;
    memcpy(keys, next, sizeof(char *) * num);
    places(all_values, pages, low, num, a->page_size, a->v_page, a->v_slot, half, values);
    ahead_of = least(to, after + KB) - after;
    if (ahead_of > 0) places(all_keys, pages, after, ahead_of, a->page_size, a->k_page, a->k_slot, half, next);
    const Sight sight = {a->tree ? num : position + 1 - low, group, num};
    const long padded = (num + VL - 1) / VL * VL;
    long j = 0;
    if (wide) {
      for (j = 0; half && j < num; j++) {
        take_apart(keys[j], dim, buffer + j * dim);
        keys[j] = (const char *)(buffer + j * dim);
      }
      turn(keys, num, dim, turned);
      all_turned_dots(q, R, dim, turned, &sight, scores);
    } else {
      for (; j + 4 <= num; j += 4) {
        for (int i = 0; i < 4; i++) {
          fetch(values[j + i], value_dim * size);
          if (j + i < ahead_of) fetch(next[j + i], dim * size);
        }
        all_dots(q, R, dim, keys + j, half, 4, scores + j);
      }
      for (; j < num; j++) all_dots(q, R, dim, keys + j, half, 1, scores + j);
    }
    for (long r = 0, line = 0, head = 0; r < R; r++) {
      float *s = scores + r * KB;
      if (a->softcap > 0)
        for (j = 0; j < num; j++) s[j] = (float)a->softcap * tanhf(s[j] / (float)a->softcap);
      long seen = num;
      if (a->tree) {
        const uint8_t *bits = a->tree + (start + item->first_row + line) * a->tree_row;
        for (j = most(0, prefix - low); j < num; j++)
          if (!bits[low + j - prefix]) s[j] = -INFINITY;
      } else {
        const long own = position + line;
        seen = most(0, least(num, own + 1 - low));
        if (a->window)
          for (j = 0; j < least(num, own - a->window + 1 - low); j++) s[j] = -INFINITY;
      }
      for (j = seen; j < padded; j++) s[j] = -INFINITY;
      vf best = splat(-INFINITY);
      for (j = 0; j < padded; j += VL) best = larger(*(const vfu *)(s + j), best);
      const float here = largest_of(best), new_top = here > top[r] ? here : top[r];
      /* Without a visible key so far all weights are 0; -inf minus itself would be NaN. */
      const float base = new_top == -INFINITY ? 0 : new_top;
      vf total = {0};
      for (j = 0; j < padded; j += VL) {
        vf weight = exp_of(*(const vfu *)(s + j) - splat(base));
        *(vfu *)(s + j) = weight;
        total += weight;
      }
      if (top[r] != new_top) {
        const vf factor = exp_of(splat(top[r] - base));
        sums_of_rows[r] *= factor;
        for (long d = 0; d < value_dim; d += VL) *(vfu *)(acc + r * value_dim + d) *= factor;
        top[r] = new_top;
      }
      sums_of_rows[r] += total;
      if (++head == group) head = 0, line++;
    }
    if (half && wide)
      for (j = 0; j < num; j++) {
        take_apart(values[j], value_dim, buffer + j * value_dim);
        values[j] = (const char *)(buffer + j * value_dim);
      }
    mix_all(scores, R, values, &sight, acc, value_dim, half && !wide);
    low = after;
  }
  for (long r = 0; r < R; r++) sum[r] = sum_of(sums_of_rows[r]);
  if (item->num_chunks > 1) return;
  for (long r = 0; r < R; r++)
    finish(a, acc + r * value_dim, top[r], sum[r], start + item->first_row + r / group, item->kv_head * group + r % group);
}

static void attend_floats(const Attention *a, const Item *item, float *partials) { attend(a, item, partials, 0, 0, ROWS); }
static void attend_halves(const Attention *a, const Item *item, float *partials) { attend(a, item, partials, 1, 0, ROWS); }
static void attend_many_floats(const Attention *a, const Item *item) { attend(a, item, NULL, 0, 1, WIDE_ROWS); }
static void attend_many_halves(const Attention *a, const Item *item) { attend(a, item, NULL, 1, 1, WIDE_ROWS); }

static void attend_item(const Attention *a, const Item *item, float *partials) {
  if (item->wide) (a->half ? attend_many_halves : attend_many_floats)(a, item);
  else (a->half ? attend_halves : attend_floats)(a, item, partials);
}

/* Adds up the chunks of the rows whose first chunk is `item`, in order. */
static void merge_item(const Attention *a, const Item *item, const float *partials) {
  const long group = a->heads / a->kv_heads, R = item->num_rows * group, dim = a->value_dim, step = R * (dim + 2);
  float acc[MAX_DIM];
  long start, count;
  rows_of(a, item->request, &start, &count);
  for (long r = 0; r < R; r++) {
    float top = -INFINITY, sum = 0;
    for (long c = 0; c < item->num_chunks; c++) {
      const float other = partials[item->partial + c * step + R * dim + r];
      top = other > top || other != other ? other : top;
    }
    for (long d = 0; d < dim; d++) acc[d] = 0;
    for (long c = 0; c < item->num_chunks; c++) {
      const float *part = partials + item->partial + c * step;
      const float other = part[R * dim + r], scale = other == -INFINITY ? 0 : expf(other - top);
      sum += part[R * dim + R + r] * scale;
      for (long d = 0; d < dim; d++) acc[d] += part[r * dim + d] * scale;
    }
    finish(a, acc, top, sum, start + item->first_row + r / group, item->kv_head * group + r % group);
  }
}

static void attend_items(const Attention *a, const Item *items, long num_items, float *partials) {
#pragma omp for schedule(dynamic, 1)
  for (long i = 0; i < num_items; i++) attend_item(a, items + i, partials);
#pragma omp for schedule(static) nowait
  for (long i = 0; i < num_items; i++)
    if (items[i].num_chunks > 1 && items[i].chunk == 0) merge_item(a, items + i, partials);
}

/* Rows of an item, and chunks of its keys. */
INLINE void cut(const Attention *a, long request, long row, long count, long *rows, long *chunks, long *keys) {
  const long group = a->heads / a->kv_heads, wide = count > NARROW, limit = most(1, (wide ? WIDE_ROWS : ROWS) / group);
  long begin, end;
  /* Wide items are of one size; the others begin at fixed rows. */
  *rows = wide ? (count + (count + limit - 1) / limit - 1) / ((count + limit - 1) / limit) : limit;
  *rows = least(*rows, count - row);
  reach_of(a, request, row, *rows, &begin, &end);
  *chunks = end > begin && !wide ? (end - 1) / CHUNK - begin / CHUNK + 1 : 1;
  *keys = most(0, end - begin);
}

/* 0, or 1 when memory ran out. */
int specops_attention(const Attention *a, int threads) {
  const long group = a->heads / a->kv_heads;
  long num_items = 0, partial = 0, work = 0, last_row = 0, rows, chunks, keys, start, count;
  for (long b = 0; b < a->batch; b++) {
    rows_of(a, b, &start, &count);
    last_row = start + count;
    for (long row = 0; row < count; row += rows) {
      cut(a, b, row, count, &rows, &chunks, &keys);
      num_items += a->kv_heads * chunks;
    }
  }
  Item few[64], *items = few;
  if (num_items > 64 && !(items = malloc(sizeof(Item) * num_items))) return 1;
  long n = 0;
  for (long b = 0; b < a->batch; b++) {
    rows_of(a, b, &start, &count);
    for (long row = 0; row < count; row += rows) {
      cut(a, b, row, count, &rows, &chunks, &keys);
      work += rows * a->heads * keys * (a->dim + a->value_dim);
      for (long h = 0; h < a->kv_heads; h++)
        for (long c = 0; c < chunks; c++) {
          items[n] = (Item){.request = (int32_t)b, .kv_head = (int32_t)h, .first_row = (int32_t)row, .chunk = (int32_t)c};
          items[n].num_rows = (int32_t)rows, items[n].num_chunks = (int32_t)chunks, items[n].wide = count > NARROW;
          items[n++].partial = partial;
          if (chunks > 1) partial += rows * group * (a->value_dim + 2);
        }
    }
  }
  float *partials = partial ? malloc(sizeof(float) * partial) : NULL;
  if (partial && !partials) {
    if (items != few) free(items);
    return 1;
  }
  if (threads > 1 && work >= TEAM_WORK) {
#pragma omp parallel num_threads(threads)
    attend_items(a, items, num_items, partials);
  } else
    attend_items(a, items, num_items, partials);
  /* Rows behind the last request belong to nobody. */
  const long size = a->heads * a->value_dim * (a->half ? 2 : 4);
  if (last_row < a->rows) memset(a->out + last_row * size, 0, (a->rows - last_row) * size);
  free(partials);
  if (items != few) free(items);
  return 0;
}

/* Writing a cache ------------------------------------------------------------------------------------------------- */

/* Field order as in native.py: what changes from call to call comes first. Strides are in bytes. */
typedef struct {
  const char *k, *v;
  const void *slots;
  int64_t slot_stride, wide_slots, rows, k_row, k_head, v_row, v_head;
  char *k_cache, *v_cache;
  int64_t k_page, k_slot, k_cache_head, v_page, v_slot, v_cache_head;
  int64_t heads, k_size, v_size, page_size, pages;
} Store;

INLINE int64_t slot_of(const Store *s, long row) {
  const long at = row * s->slot_stride;
  return s->wide_slots ? ((const int64_t *)s->slots)[at] : ((const int32_t *)s->slots)[at];
}

INLINE void write_heads(char *to, const char *from, long heads, long size, long to_head, long from_head) {
  if (to_head == size && from_head == size) memmove(to, from, heads * size);
  else
    for (long h = 0; h < heads; h++) memmove(to + h * to_head, from + h * from_head, size);
}

/* Keys and values of each row to its slot, bit for bit; negative slots are skipped. -1, or the first row whose slot is
 * behind the cache: then nothing is written. */
long specops_store(const Store *s, int threads) {
  const int64_t end = s->pages * s->page_size;
  for (long row = 0; row < s->rows; row++)
    if (slot_of(s, row) >= end) return row;
  const long bytes = s->rows * s->heads * (s->k_size + s->v_size);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && bytes >= 1 << 18)
  for (long row = 0; row < s->rows; row++) {
    const int64_t slot = slot_of(s, row);
    if (slot < 0) continue;
    const int64_t page = slot / s->page_size, offset = slot % s->page_size;
    write_heads(s->k_cache + page * s->k_page + offset * s->k_slot, s->k + row * s->k_row, s->heads, s->k_size,
                s->k_cache_head, s->k_head);
    write_heads(s->v_cache + page * s->v_page + offset * s->v_slot, s->v + row * s->v_row, s->heads, s->v_size,
                s->v_cache_head, s->v_head);
  }
  return -1;
}

/* Layers in a row ------------------------------------------------------------------------------------------------- */

/* One layer of a stack; field order as in native.py. */
typedef struct {
  const Layer *layer;
  void *k, *v;
  const float *sinks;
  int64_t window;
  double scale, softcap;
} Block;

/* Layers of one shape, attention included. streams [count + 1, T, hidden]: the first is read, the others are written.
 *
 * shared: the attention of all layers; its q and out are buffers of this call. strides: of a page, a token, a head of k,
 * then of v. 0, or 1 when memory ran out. */
int specops_stack(const Block *blocks, long count, char *streams, const Attention *shared, const void *cos, const void *sin,
                  const int64_t *slots, float *work, int threads) {
  const long T = shared->rows;
  Attention call = *shared;
  for (long i = 0; i < count; i++) {
    const Block *block = blocks + i;
    const long size = T * block->layer->hidden * (block->layer->half ? 2 : 4);
    const int64_t strides[6] = {call.k_page, call.k_slot, call.k_head, call.v_page, call.v_slot, call.v_head};
    call.k = block->k, call.v = block->v, call.sinks = block->sinks;
    call.window = block->window, call.scale = block->scale, call.softcap = block->softcap;
    specops_layer_in(block->layer, streams + i * size, T, cos, sin, slots, (void *)call.q, block->k, block->v, strides,
                     call.page_size, work, threads);
    if (specops_attention(&call, threads)) return 1;
    specops_layer_out(block->layer, call.out, streams + i * size, streams + (i + 1) * size, T, work, threads);
  }
  return 0;
}

/* The likeliest tokens -------------------------------------------------------------------------------------------- */

INLINE int above(float x, float y) { return x > y || (x != x && y == y); } /* NaN is the largest, as for torch.topk */

INLINE void rank_row(const void *logits, long V, long k, int half, int logprobs, float *values, int64_t *tokens) {
  float block[8 * VL];
  long found = 0;
  for (long i = 0; i < V; i += 8 * VL) {
    const long count = V - i < 8 * VL ? V - i : 8 * VL;
    const float *part = block;
    if (!half) part = (const float *)logits + i;
    else
      for (long j = 0; j < count; j++) block[j] = get(logits, i + j, 1);
    if (found == k && count == 8 * VL) {
      vi rest = (vi){0} == (vi){0};
      for (int j = 0; j < 8; j++) rest &= *(const vfu *)(part + j * VL) <= splat(values[k - 1]);
      int32_t all = -1;
      for (int j = 0; j < VL; j++) all &= rest[j];
      if (all) continue;
    }
    for (long j = 0; j < count; j++) {
      if (found == k && !above(part[j], values[k - 1])) continue;
      long place = found < k ? found++ : k - 1;
      for (; place > 0 && above(part[j], values[place - 1]); place--)
        values[place] = values[place - 1], tokens[place] = tokens[place - 1];
      values[place] = part[j], tokens[place] = i + j;
    }
  }
  if (!logprobs) return;
  const float top = values[0];
  vf total = {0};
  float rest = 0;
  long i = 0;
  if (top > -INFINITY && top < INFINITY) {
    for (; i + VL <= V; i += VL) {
      vf x;
      if (half)
        for (int j = 0; j < VL; j++) x[j] = get(logits, i + j, 1);
      else x = *(const vfu *)((const float *)logits + i);
      total += exp_of(x - splat(top));
    }
    for (; i < V; i++) rest += expf(get(logits, i, half) - top);
  }
  const float norm = top + logf(sum_of(total) + rest);
  for (long j = 0; j < k; j++) values[j] -= norm;
}

/* The k largest of each row of logits [R, V], largest first, the least token among equals; with logprobs less the row's
 * logsumexp. values [R, k] float32, tokens [R, k]. */
void specops_top_tokens(const void *logits, long R, long V, long k, int half, int logprobs, float *values, int64_t *tokens,
                        int threads) {
#pragma omp parallel for num_threads(team(R > 1 ? R * V : 0, threads)) schedule(static)
  for (long r = 0; r < R; r++) {
    if (half) rank_row((const uint16_t *)logits + r * V, V, k, 1, logprobs, values + r * k, tokens + r * k);
    else rank_row((const float *)logits + r * V, V, k, 0, logprobs, values + r * k, tokens + r * k);
  }
}

/* Changes whenever a signature or a struct above does. */
int specops_native_version(void) { return 4; }
