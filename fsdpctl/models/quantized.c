/* Dequantizes groups in NF4 in one pass: the operations of quantized.py in their order. */
#include <stdint.h>
#include <string.h>

#define BLOCK 64

struct pair { float first, second; };

/* `pairs`: the values of the two codes in each byte; `blocks`: of a row, which is a group. */
void dequantize(const struct pair *pairs, int64_t blocks, int64_t rows, const uint8_t *packed,
                float *target)
{
    for (int64_t row = 0; row < rows; row++) {
        const uint8_t *codes = packed + 8, *levels = codes + blocks * BLOCK / 2;
        float first, second;
        memcpy(&first, packed, 4);
        memcpy(&second, packed + 4, 4);
        for (int64_t block = 0; block < blocks; block++) {
            const float root = levels[block] * second + first, square = root * root;
            const float scale = square * square;
            for (int i = 0; i < BLOCK; i += 2, codes++) {
                const struct pair values = pairs[*codes];
                *target++ = values.first * scale;
                *target++ = values.second * scale;
            }
        }
        packed = levels + blocks;
    }
}
