/* A step of AdamW over compressed states, in one pass: the operations of tiles.py in their order.
   Macros select the variant. GRADIENT, MOMENTS: FLOAT32, BFLOAT16 or (moments) CODES; SPLIT: whether
   the weights are bf16 halves with remainders. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 64
#define FLOAT32 0
#define BFLOAT16 1
#define CODES 2
#define EACH for (int i = 0; i < count; i++)

#if MOMENTS == CODES
typedef int8_t First;
typedef uint8_t Second;
#elif MOMENTS == BFLOAT16
typedef uint16_t First, Second;
#else
typedef float First, Second;
#endif

struct factors { float share, beta1, beta2, unit, root, codes, eps, bound, rate, kept; };

static inline float of_bits(int32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
static inline int32_t bits_of(float x) { int32_t bits; memcpy(&bits, &x, 4); return bits; }
static inline float of_half(uint16_t half) { return of_bits((int32_t)((uint32_t)half << 16)); }
static inline float larger(float x, float than) { return x < than ? than : x; }

static inline uint16_t nearest_half(float x) {
    uint32_t bits = (uint32_t)bits_of(x);
    return x != x ? 0x7FC0 : (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

/* Rounds up to bf16, as codes.py does. */
static inline uint16_t scale_of(float largest) {
    int32_t bits = bits_of(largest > 0x1.FEp127f ? 0x1.FEp127f : largest);
    return (uint16_t)(((bits > 0x7F800000 ? 0x7F800000 : bits) + 0xFFFF) >> 16);
}

static inline float largest_of(const float *values) {
    int32_t most = INT32_MIN;
    for (int i = 0; i < BLOCK; i++) most = bits_of(values[i]) > most ? bits_of(values[i]) : most;
    return of_bits(most);
}

static inline void read(float *out, const void *values, int is_half, int count) {
    if (is_half) EACH out[i] = of_half(((const uint16_t *)values)[i]);
    else EACH out[i] = ((const float *)values)[i];
}

static inline void write(void *values, const float *in, int is_half, int count) {
    if (is_half) EACH ((uint16_t *)values)[i] = nearest_half(in[i]);
    else EACH ((float *)values)[i] = in[i];
}

/* Subtracts an update from weights that have decayed. */
static inline void apply(void *weights, int8_t *low, const float *update, float kept, int count) {
#if SPLIT
    int16_t *half = weights;
    EACH {
        uint32_t wide = (((uint32_t)(int32_t)half[i] << 8) + (uint32_t)(int32_t)low[i]) << 8;
        int32_t bits = bits_of(of_bits((int32_t)wide) * kept - update[i]);
        bits = ((bits > 0x7FC00000 ? 0x7FC00000 : bits) + 0x8080) >> 8 ^ 128;
        low[i] = (int8_t)bits;
        half[i] = (int16_t)(bits >> 8);
    }
#else
    float *whole = weights;
    EACH whole[i] = whole[i] * kept - update[i];
#endif
}

/* Steps up to a block, which all codes of a scale are in. */
static inline __attribute__((always_inline)) void step_block(
    int count, const void *gradient, void *weights, int8_t *low, First *first, uint16_t *first_scale,
    Second *second, uint16_t *second_scale, const struct factors *by)
{
    float grad[BLOCK], m[BLOCK], v[BLOCK], work[BLOCK];
    const float share = by->share, eps = by->eps, bound = by->bound, rate = by->rate;
    read(grad, gradient, GRADIENT == BFLOAT16, count);
    EACH grad[i] *= share;
#if MOMENTS == CODES
    const float one = of_half(*first_scale) * by->beta1, two = of_half(*second_scale) * by->beta2;
    EACH { float code = first[i]; m[i] = code / (fabsf(code) - 254.0f) * one + grad[i]; }
    EACH { float code = second[i] * two; v[i] = sqrtf(code * code + grad[i] * grad[i]); }
#else
    const float one = by->beta1, two = by->beta2, unit = by->unit;
    read(m, first, MOMENTS == BFLOAT16, count);
    read(v, second, MOMENTS == BFLOAT16, count);
    EACH m[i] = m[i] * one + grad[i];
    EACH v[i] = v[i] * two + grad[i] * grad[i] * unit;
    write(first, m, MOMENTS == BFLOAT16, count);
    write(second, v, MOMENTS == BFLOAT16, count);
    EACH v[i] = sqrtf(v[i]);
#endif
    EACH {
        float quotient = m[i] / (v[i] + eps);
        work[i] = (quotient < -bound ? -bound : quotient > bound ? bound : quotient) * rate;
    }
    apply(weights, low, work, by->kept, count);
#if MOMENTS == CODES
    EACH work[i] = fabsf(m[i]);
    *first_scale = scale_of(largest_of(work));
    const float row = larger(of_half(*first_scale), 1e-35f);
    EACH first[i] = (int8_t)(int32_t)nearbyintf(m[i] / (work[i] + row) * 254.0f);
    *second_scale = scale_of(largest_of(v) * by->root);
    const float unrooted = 1.0f / larger(of_half(*second_scale), 1e-35f) * by->codes;
    EACH {
        float code = nearbyintf(v[i] * unrooted);
        second[i] = (uint8_t)(int32_t)larger(code, v[i] > 0.0f ? 1.0f : 0.0f);
    }
#endif
}

void step(const struct factors *by, int64_t count, const char *gradient, char *weights, int8_t *low,
          First *first, uint16_t *first_scales, Second *second, uint16_t *second_scales)
{
    for (int64_t i = 0; i < count; i += BLOCK) {
        const void *grad = gradient + i * (GRADIENT == BFLOAT16 ? 2 : 4);
        void *these = weights + i * (SPLIT ? 2 : 4);
        uint16_t *one = first_scales + i / BLOCK, *two = second_scales + i / BLOCK;
        if (count - i >= BLOCK)  /* of a constant size, which is vectorized */
            step_block(BLOCK, grad, these, low + i, first + i, one, second + i, two, by);
        else
            step_block((int)(count - i), grad, these, low + i, first + i, one, second + i, two, by);
    }
}
