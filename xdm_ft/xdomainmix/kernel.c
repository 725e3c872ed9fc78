/* XDomainMix for H heads of B samples with K features each, as README.md maps it. selection.py and one_pass.py call it.
 *
 * All arrays are contiguous. Masks are bytes 0 or 1; classes, domains and places are int64. Every function works on
 * rows (samples) or heads first … last−1, so that threads can share them. Must not be compiled with -ffast-math.
 */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* ---- equations (1) to (3): masks ---- */

#define INFINITE_ORDER 0x7f800000 /* of +∞; beyond it, on either side, lie the NaNs */
#define GUESSES 24                /* then bisection takes over; half of the rows are solved after five */

/* An integer for every float, in the floats' order; −0 and +0 are 0 both. */
static inline int32_t order_of(float value) {
    int32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits < 0 ? (int32_t)(0x80000000u - (uint32_t)bits) : bits;
}

static inline float from_order(int32_t order) {
    const int32_t bits = order < 0 ? (int32_t)(0x80000000u - (uint32_t)order) : order;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static int32_t count_above(const int32_t *row, int64_t size, int32_t tau) {
    int32_t count = 0;
    for (int64_t k = 0; k < size; k++) count += row[k] > tau;
    return count;
}

/* Some τ such that score > τ is score > x_(rank); INT32_MAX for a row with a NaN. All in the floats' order.
 *
 * m = size−1−rank scores may lie above it, or fewer where ties forbid m. More than m lie above `low`, at most m above
 * `high`, always. τ is looked for from `guess` on by false position on these counts (Illinois rule: an end that stays
 * loses half its weight), then by bisection, which ends at neighbours: `high` is then x_(rank), and tied. */
static int32_t divider(const int32_t *row, int64_t size, int64_t rank, int32_t guess) {
    const int32_t above = (int32_t)(size - 1 - rank);
    int32_t least = INT32_MAX, most = INT32_MIN, positive = 0, negative = 0;
    for (int64_t k = 0; k < size; k++) {
        const int32_t s = row[k];
        least = s < least ? s : least;
        most = s > most ? s : most;
        positive += s > 0;
        negative += s < 0;
    }
    if (most > INFINITE_ORDER || least < -INFINITE_ORDER) return INT32_MAX;
    if (above == 0 || least == most) return most;
    if (positive <= above && size - negative > above) return 0; /* features after ReLU are full of zeros */
    int32_t low = least - 1, high = most;
    float low_excess = (float)(size - above), high_excess = (float)-above;
    if (positive > above) {
        low = 0, low_excess = (float)(positive - above);
    } else {
        high = -1, high_excess = (float)(size - negative - above); /* at most 0, as 0 is none of the scores above */
    }
    for (int pass = 0; (int64_t)high - low > 1; pass++) {
        if (high_excess == 0) break;
        int32_t tau = guess;
        if (pass > 0) {
            const float from = from_order(low), to = from_order(high);
            tau = order_of(from + (to - from) * (low_excess / (low_excess - high_excess)));
        }
        if (pass >= GUESSES || tau <= low || tau >= high) tau = (int32_t)(((int64_t)low + high) >> 1);
        const int32_t excess = count_above(row, size, tau) - above;
        if (excess == 0) return tau;
        if (excess > 0) {
            low = tau, low_excess = (float)excess, high_excess /= 2;
        } else {
            high = tau, high_excess = (float)excess, low_excess /= 2;
        }
    }
    return high;
}

/* 1 where the score weight[k] z[k] exceeds its divider, which is returned as the next row's first guess. */
static int32_t mask_row(const float *z, const float *weight, int64_t K, int64_t rank, int32_t guess, int32_t *scores,
                        uint8_t *mask) {
    for (int64_t k = 0; k < K; k++) scores[k] = order_of(weight[k] * z[k]);
    const int32_t tau = divider(scores, K, rank, guess);
    for (int64_t k = 0; k < K; k++) mask[k] = scores[k] > tau;
    return tau == INT32_MAX ? guess : tau;
}

/* τ [n] of rows first … last−1 of scores [n,K]; NaN for a row with a NaN. 2: no memory. */
int dividers(int64_t first, int64_t last, int64_t K, const float *scores, int64_t rank, float *tau) {
    int32_t *row = malloc(sizeof(int32_t) * (size_t)K), guess = 0;
    if (row == NULL) return 2;
    for (int64_t n = first; n < last; n++) {
        for (int64_t k = 0; k < K; k++) row[k] = order_of(scores[n * K + k]);
        const int32_t found = divider(row, K, rank, guess);
        tau[n] = from_order(found);
        guess = found == INT32_MAX ? guess : found;
    }
    free(row);
    return 0;
}

/* M of rows first … last−1 of [H·B,K], by the scores of heads with weights [H,C,K] at targets [H·B].
 * 1: a target is none of 0 … C−1; 2: no memory. */
int masks(int64_t first, int64_t last, int64_t B, int64_t K, int64_t C, const float *z, const float *weight,
          const int64_t *target, int64_t rank, uint8_t *mask) {
    int32_t *scores = malloc(sizeof(int32_t) * (size_t)K), guess = 0;
    if (scores == NULL) return 2;
    for (int64_t row = first; row < last; row++) {
        if (target[row] < 0 || target[row] >= C) {
            free(scores);
            return 1;
        }
        const float *true_weight = weight + (row / B * C + target[row]) * K;
        guess = mask_row(z + row * K, true_weight, K, rank, guess, scores, mask + row * K);
    }
    free(scores);
    return 0;
}

/* ---- equations (4) to (7): the augmented features ---- */

/* z̃ of rows first … last−1. lam is λ1, λ2 [H·B,2], 1 without a partner; places are within the head's batch.
 * 1: a place is none of 0 … B−1. */
int mix(int64_t first, int64_t last, int64_t B, int64_t K, const float *z, const uint8_t *class_mask,
        const uint8_t *domain_mask, const int64_t *same, const int64_t *other, const float *lam, const uint8_t *keep,
        float *mixed) {
    for (int64_t row = first; row < last; row++) {
        if (same[row] < 0 || same[row] >= B || other[row] < 0 || other[row] >= B) return 1;
        const int64_t batch = row - row % B, i = (batch + same[row]) * K, j = (batch + other[row]) * K, own = row * K;
        const float lam_1 = lam[2 * row], lam_2 = lam[2 * row + 1], rest_1 = 1 - lam_1, rest_2 = 1 - lam_2;
        const uint8_t kept = keep[row];
        float *restrict out = mixed + own;
        for (int64_t k = 0; k < K; k++) {
            const uint8_t c = class_mask[own + k], d = domain_mask[own + k];
            const float value = z[own + k];
            const float csds = c & d & kept ? lam_1 * value : 0, cgds = ~c & d ? lam_2 * value : 0;
            const float csds_i = class_mask[i + k] & domain_mask[i + k] & kept ? rest_1 * z[i + k] : 0;
            const float cgds_j = ~class_mask[j + k] & domain_mask[j + k] ? rest_2 * z[j + k] : 0;
            out[k] = (csds + csds_i) + (cgds + cgds_j) + (d ? 0 : value);
        }
    }
    return 0;
}

/* ---- equation (5): partners, λ and discard; the numbers are those of randomness.py ---- */

static uint64_t hash(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

static uint64_t with_key(uint64_t x, int64_t key) { return hash((x ^ (uint64_t)key) + 0x9E3779B97F4A7C15u); }

static float uniform(uint64_t of_seed_stream_and_step, int64_t index) {
    return (float)(with_key(of_seed_stream_and_step, index) >> 40) * (1.0f / (1 << 24));
}

#define BLOCK 32

typedef struct {
    const int32_t *y, *domain;
    int32_t of_class, of_domain, same_class, same_domain;
} Wanted;

static inline int32_t fits(const Wanted *wanted, int64_t s) {
    return ((wanted->y[s] == wanted->of_class) == wanted->same_class) &
           ((wanted->domain[s] == wanted->of_domain) == wanted->same_domain);
}

static inline int32_t count_fitting(const Wanted *wanted, int64_t first, int64_t last) {
    const Wanted own = *wanted;
    int32_t count = 0;
    for (int64_t s = first; s < last; s++) count += fits(&own, s);
    return count;
}

/* The ⌊u·n⌋-th of the n samples of 0 … B−1 that fit; −1 where n = 0. `excluded`, which fits, is not among them unless
 * it is the only one; −1: none. */
static int64_t pick(int64_t B, const Wanted *wanted, int64_t excluded, float u) {
    int32_t count = count_fitting(wanted, 0, B);
    if (count == 0) return -1;
    if (count == 1) excluded = -1;
    count -= excluded >= 0;
    int32_t left = (int32_t)(u * (float)count);
    if (left > count - 1) left = count - 1; /* the float product must not round up to n */
    for (int64_t block = 0; block < B; block += BLOCK) {
        const int64_t end = block + BLOCK < B ? block + BLOCK : B;
        const int32_t here = count_fitting(wanted, block, end) - (excluded >= block && excluded < end);
        if (left >= here) {
            left -= here;
            continue;
        }
        for (int64_t s = block; s < end; s++)
            if (fits(wanted, s) && s != excluded && left-- == 0) return s;
    }
    return -1;
}

/* The random choices of heads first … last−1 at a step. The keys are seeds [H], `step`, `streams` (of partners, λ and
 * discard) and index [H,B]. `other_is` is 0 for another class and domain, 1 for another class and the same domain, 2 for
 * the same class and another domain, but x_i itself only where there is no one else, 3 for x_i. 2: no memory. */
int draw(int64_t first, int64_t last, int64_t B, const int64_t *seed, int64_t step, const int64_t *streams,
         const int64_t *index, const int64_t *y, const int64_t *domain, int64_t other_is, const float *p_discard,
         int64_t discard_per_batch, int64_t mix_same, int64_t mix_other, int64_t *same, int64_t *other,
         uint8_t *has_same, uint8_t *has_other, float *lam, uint8_t *keep) {
    int32_t *short_y = malloc(2 * sizeof(int32_t) * (size_t)B), *short_domain = short_y + B;
    if (short_y == NULL) return 2;
    for (int64_t h = first; h < last; h++) {
        uint64_t key[3]; /* of partners, λ, discard */
        for (int use = 0; use < 3; use++)
            key[use] = with_key(with_key(with_key(0, seed[h]), streams[use]), step);
        for (int64_t b = 0; b < B; b++) short_y[b] = (int32_t)y[h * B + b], short_domain[b] = (int32_t)domain[h * B + b];
        for (int64_t b = 0; b < B; b++) {
            const int64_t row = h * B + b, at = index[row];
            const Wanted for_i = {short_y, short_domain, short_y[b], short_domain[b], 1, 0};
            const Wanted for_j = {short_y, short_domain, short_y[b], short_domain[b], other_is == 2, other_is == 1};
            const int64_t i = pick(B, &for_i, -1, uniform(key[0], 2 * at));
            const int64_t j =
                other_is == 3 ? i : pick(B, &for_j, other_is == 2 ? i : -1, uniform(key[0], 2 * at + 1));
            same[row] = i < 0 ? b : i, has_same[row] = i >= 0;
            other[row] = j < 0 ? b : j, has_other[row] = j >= 0;
            lam[2 * row] = i >= 0 && mix_same ? uniform(key[1], 2 * at) : 1;
            lam[2 * row + 1] = j >= 0 && mix_other ? uniform(key[1], 2 * at + 1) : 1;
            keep[row] = uniform(key[2], discard_per_batch ? 0 : at) >= p_discard[h];
        }
    }
    free(short_y);
    return 0;
}
