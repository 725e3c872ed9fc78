/* Optimizers of H stacked models, one parameter tensor [H,size] at a time, in one pass over memory; optimizers.py calls
 * it and says what they compute. lr, weight_decay and momentum are [H]; everything else is [H,size]. Each function works on the
 * heads first … last−1, so that threads can share them.
 */

#include <math.h>
#include <stdint.h>

int sgd(int64_t first, int64_t last, int64_t size, const float *gradient, const float *lr, const float *weight_decay,
        const float *momentum, float factor, float *restrict parameter, float *restrict velocity) {
    for (int64_t h = first; h < last; h++) {
        const float rate = lr[h] * factor, decay = weight_decay[h], keeps = momentum[h];
        for (int64_t k = h * size; k < (h + 1) * size; k++) {
            velocity[k] = velocity[k] * keeps + (gradient[k] + decay * parameter[k]);
            parameter[k] -= rate * velocity[k];
        }
    }
    return 0;
}

/* `step` counts from 1. `decoupled`: AdamW. */
int adam(int64_t first, int64_t last, int64_t size, const float *gradient, const float *lr, const float *weight_decay,
         float factor, int64_t step, int64_t decoupled, double beta1, double beta2, float eps,
         float *restrict parameter, float *restrict mean, float *restrict square) {
    const float b1 = (float)(1 - beta1), b2 = (float)beta2, c2 = (float)(1 - beta2);
    const float unbias_mean = (float)(1 / (1 - pow(beta1, (double)step)));
    const float unbias_root = (float)(1 / sqrt(1 - pow(beta2, (double)step)));
    for (int64_t h = first; h < last; h++) {
        const float rate = lr[h] * factor;
        const float shrink = decoupled ? 1 - rate * weight_decay[h] : 1, decay = decoupled ? 0 : weight_decay[h];
        for (int64_t k = h * size; k < (h + 1) * size; k++) {
            const float g = gradient[k] + decay * parameter[k];
            mean[k] += b1 * (g - mean[k]);
            square[k] = square[k] * b2 + c2 * g * g;
            const float ratio = mean[k] / (sqrtf(square[k]) * unbias_root + eps);
            parameter[k] = parameter[k] * shrink - unbias_mean * rate * ratio;
        }
    }
    return 0;
}
