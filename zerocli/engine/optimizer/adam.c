/* Adam and AdamW on a CPU, in one pass over all that a parameter has. compiled_update.py compiles it and calls it.

   All rounding is written out, so it is compiled with -ffp-contract=off. A block is converted to fp32 and updated in the
   cache nearest to the core: memory is read and written once, whatever the number of loops below. What comes two blocks
   later is asked for before a block is computed, else memory would rest meanwhile (on one core: 1.0 s for a billion
   parameters, without it 1.4 s, and 2.2 s with blocks of 1024). */
#include <stdint.h>
#include <string.h>

#define BLOCK 128
#define AHEAD (2 * BLOCK)
#define PARTS 8                                               /* of an array, for each thread */

enum { FP32, BF16, FP16, NONE };                              /* types of gradients and parameters */
enum { DECAY_FMA = 1, AVERAGE_FMA = 2, SQUARE_FMA = 4, SQUARE_FMA_LAST = 8 }; /* bits of `rounding` */

struct update {
    int64_t numel;
    void *parameters, *master, *grad;                         /* master: fp32, or the int16 remainder if `split` */
    float *average, *square, *maximum;                        /* maximum: of amsgrad, or null */
    int32_t parameter_type, grad_type, split, rounding;
    float factor;                                             /* gradients are multiplied by it */
    struct {
        float decay, keep;                                    /* Adam: added to gradients; AdamW: left of the master */
        float weight, beta2, square_weight, step_size, correction, eps;
    } values;
};

static inline float as_float(uint32_t bits) { float value; memcpy(&value, &bits, 4); return value; }
static inline uint32_t as_bits(float value) { uint32_t bits; memcpy(&bits, &value, 4); return bits; }

static inline uint32_t bf16_bits(float value)                 /* ties away from zero: [Note: split master] */
{
    return value == value ? (as_bits(value) + 0x8000u) >> 16 : 0x7FC0u;
}

static void load_grad(float *restrict out, const struct update *u, int64_t at, int n)
{
    const float factor = u->factor;
    if (u->grad_type == BF16) {
        const uint16_t *restrict grad = (const uint16_t *)u->grad + at;
        for (int i = 0; i < n; i++) out[i] = as_float((uint32_t)grad[i] << 16) * factor;
    } else if (u->grad_type == FP32) {
        const float *restrict grad = (const float *)u->grad + at;
        for (int i = 0; i < n; i++) out[i] = grad[i] * factor;
#ifdef __FLT16_MAX__
    } else {
        const _Float16 *restrict grad = (const _Float16 *)u->grad + at;
        for (int i = 0; i < n; i++) out[i] = (float)grad[i] * factor;
#endif
    }
}

static void join(float *restrict master, const uint16_t *restrict high, const int16_t *restrict low, int n)
{
    for (int i = 0; i < n; i++) master[i] = as_float(((uint32_t)high[i] << 16) + (uint32_t)(int32_t)low[i]);
}

static void split(const float *restrict master, uint16_t *restrict high, int16_t *restrict low, int n)
{
    for (int i = 0; i < n; i++) {
        uint32_t rounded = bf16_bits(master[i]);
        high[i] = (uint16_t)rounded;
        low[i] = (int16_t)(as_bits(master[i]) - (rounded << 16));
    }
}

static void narrow(const float *restrict master, const struct update *u, int64_t at, int n)
{
    if (u->parameter_type == BF16) {
        uint16_t *restrict out = (uint16_t *)u->parameters + at;
        for (int i = 0; i < n; i++) out[i] = (uint16_t)bf16_bits(master[i]);
#ifdef __FLT16_MAX__
    } else if (u->parameter_type == FP16) {
        _Float16 *restrict out = (_Float16 *)u->parameters + at;
        for (int i = 0; i < n; i++) out[i] = (_Float16)master[i];
#endif
    }
}

/* a * b + c, with one rounding or two */
#define MULTIPLY_ADD(one, a, b, c) ((one) ? __builtin_fmaf(a, b, c) : (a) * (b) + (c))

static void update_average(float *restrict average, const float *restrict grad, const struct update *u, int n)
{
    const float weight = u->values.weight, rest = weight - 1.0f;
    const int once = u->rounding & AVERAGE_FMA;
    if (weight > -0.5f && weight < 0.5f)                      /* as torch.lerp chooses */
        for (int i = 0; i < n; i++) average[i] = MULTIPLY_ADD(once, weight, grad[i] - average[i], average[i]);
    else
        for (int i = 0; i < n; i++) average[i] = MULTIPLY_ADD(once, rest, grad[i] - average[i], grad[i]);
}

static void update_square(float *restrict square, const float *restrict grad, const struct update *u, int n)
{
    const float beta2 = u->values.beta2, weight = u->values.square_weight;
    if (u->rounding & SQUARE_FMA)
        for (int i = 0; i < n; i++) square[i] = __builtin_fmaf(square[i], beta2, weight * grad[i] * grad[i]);
    else if (u->rounding & SQUARE_FMA_LAST)
        for (int i = 0; i < n; i++) square[i] = __builtin_fmaf(weight * grad[i], grad[i], square[i] * beta2);
    else
        for (int i = 0; i < n; i++) square[i] = square[i] * beta2 + weight * grad[i] * grad[i];
}

static void update_maximum(float *restrict maximum, const float *restrict square, int n)
{
    for (int i = 0; i < n; i++) maximum[i] = maximum[i] >= square[i] || maximum[i] != maximum[i] ? maximum[i] : square[i];
}

static void update_master(float *restrict master, const float *restrict average, const float *restrict square,
    const struct update *u, int n)
{
    const float keep = u->values.keep, step_size = u->values.step_size, correction = u->values.correction, eps = u->values.eps;
    for (int i = 0; i < n; i++)
        master[i] = master[i] * keep + step_size * average[i] / (__builtin_sqrtf(square[i]) / correction + eps);
}

static void add_decay(float *restrict grad, const float *restrict master, const struct update *u, int n)
{
    const float decay = u->values.decay;
    for (int i = 0; i < n; i++) grad[i] = MULTIPLY_ADD(u->rounding & DECAY_FMA, master[i], decay, grad[i]);
}

static void update_block(const struct update *u, int64_t at, int n)
{
    float grad[BLOCK], joined[BLOCK];
    float *master = u->split ? joined : (float *)u->master + at;
    float *square = u->square + at;
    load_grad(grad, u, at, n);
    if (u->split) join(joined, (uint16_t *)u->parameters + at, (int16_t *)u->master + at, n);
    if (u->values.decay != 0.0f) add_decay(grad, master, u, n);
    update_average(u->average + at, grad, u, n);
    update_square(square, grad, u, n);
    if (u->maximum) update_maximum(u->maximum + at, square, n);
    update_master(master, u->average + at, u->maximum ? u->maximum + at : square, u, n);
    if (u->split) split(joined, (uint16_t *)u->parameters + at, (int16_t *)u->master + at, n);
    else narrow(master, u, at, n);
}

static void prefetch(const void *array, int64_t at, int width)
{
    if (array)
        for (int i = 0; i < BLOCK * width; i += 64) __builtin_prefetch((const char *)array + at * width + i, 1);
}

static void update_blocks(const struct update *u, int64_t at, int64_t stop)
{
    for (; at < stop; at += BLOCK) {
        if (at + AHEAD + BLOCK <= stop) {
            prefetch(u->parameters, at + AHEAD, 2);
            prefetch(u->master, at + AHEAD, u->split ? 2 : 4);
            prefetch(u->grad, at + AHEAD, u->grad_type == FP32 ? 4 : 2);
            prefetch(u->average, at + AHEAD, 4);
            prefetch(u->square, at + AHEAD, 4);
            prefetch(u->maximum, at + AHEAD, 4);
        }
        update_block(u, at, stop - at < BLOCK ? (int)(stop - at) : BLOCK);
    }
}

/* Whether the compiler has a type for fp16. */
int has_fp16(void)
{
#ifdef __FLT16_MAX__
    return 1;
#else
    return 0;
#endif
}

/* Update all elements of `count` arrays. Threads take small parts as they become free: one whose core also does other
   work, such as the program's own thread, must not keep the others waiting. */
void update_all(const struct update *all, int count, int threads)
{
    if (threads < 2) {
        for (int i = 0; i < count; i++) update_blocks(all + i, 0, all[i].numel);
        return;
    }
#pragma omp parallel num_threads(threads)
    for (int i = 0; i < count; i++) {
        const struct update *u = all + i;
        const int64_t blocks = (u->numel + BLOCK - 1) / BLOCK, most = PARTS * (int64_t)threads;
        const int64_t parts = blocks < most ? blocks : most;
#pragma omp for schedule(dynamic) nowait
        for (int64_t part = 0; part < parts; part++) {
            const int64_t stop = blocks * (part + 1) / parts * BLOCK;
            update_blocks(u, blocks * part / parts * BLOCK, stop < u->numel ? stop : u->numel);
        }
    }
}
