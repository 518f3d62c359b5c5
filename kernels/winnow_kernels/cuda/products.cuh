// Products of queries with keys of 16 or 8 bits, on the matrix units: keys are the 16 rows of a product, and query heads its
// 8 columns. In which order a product adds up channels is free: a lane has neighbouring ones, which it loads at once.
//
// Defined by the launch (`cuda.products`): HEAD_DIM, GROUP, KV_HEADS, HEAD_TILES (products beside each other for all heads
// of a group), IS_NARROW (keys have 8 bits), COMPUTES_IN_HALVES, QUERIES_ARE_HALVES.

constexpr int ELEMENT_BYTES = IS_NARROW ? 1 : 2;
// Channels in a word as they are stored.
constexpr int IN_WORD = 4 / ELEMENT_BYTES;
// Words of a key that a lane has, of 4 lanes; those that lie next to each other.
constexpr int KEY_WORDS = HEAD_DIM / (4 * IN_WORD);
constexpr int KEY_RUN = 4;
constexpr int KEY_RUNS = KEY_WORDS / KEY_RUN;
constexpr int PRODUCTS = HEAD_DIM / 16;
static_assert(KEY_WORDS % KEY_RUN == 0, "lanes load whole runs");

// Queries of 16 bits as products take them: as they are, or as halves.
DEVICE uint32 converted(uint32 word) {
    if (QUERIES_ARE_HALVES || !COMPUTES_IN_HALVES) return word;
    // No score of use has a larger number in it, and infinity would make NaN of scores.
    const float first = fminf(fmaxf(from_bfloat(word & 0xffff), -65504.0f), 65504.0f);
    const float second = fminf(fmaxf(from_bfloat(word >> 16), -65504.0f), 65504.0f);
    return pack_halves(first, second);
}

DEVICE void multiply(float (&d)[4], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b0, uint32 b1) {
    if (COMPUTES_IN_HALVES)
        multiply_add_halves(d, a0, a1, a2, a3, b0, b1);
    else
        multiply_add_bfloats(d, a0, a1, a2, a3, b0, b1);
}

// Where the queries of a pair begin, which is a row and a KV head.
DEVICE const uint16* queries_of(const uint16* queries, int64 row_stride, int64 head_stride, int pair) {
    return queries + pair / KV_HEADS * row_stride + pair % KV_HEADS * GROUP * head_stride;
}

// The queries of a pair: of a head of each column tile a quarter, in the order of keys.
struct Queries {
    // Each has four channels of each lane.
    static constexpr int PRODUCTS_OF_RUN = KEY_RUN * IN_WORD / 4;

    uint32 words[HEAD_TILES][PRODUCTS][2];

    DEVICE void load(const uint16* queries, int64 row_stride, int64 head_stride, int pair, int lane) {
        const uint16* const of_pair = queries_of(queries, row_stride, head_stride, pair);
        for (int tile = 0; tile < HEAD_TILES; ++tile) {
            const int head = 8 * tile + lane / 4;
            const uint16* const own = of_pair + head * head_stride;
            for (int product = 0; product < PRODUCTS; ++product) {
                const int run = product / PRODUCTS_OF_RUN, of_run = product % PRODUCTS_OF_RUN;
                const int channel = run * 4 * KEY_RUN * IN_WORD + lane % 4 * KEY_RUN * IN_WORD + 4 * of_run;
                uint2 read = {0, 0};
                if (head < GROUP) read = *reinterpret_cast<const uint2*>(own + channel);
                words[tile][product][0] = read.x;
                words[tile][product][1] = read.y;
            }
        }
    }

    // Make of them what products take.
    DEVICE void convert() {
        for (int tile = 0; tile < HEAD_TILES; ++tile)
            for (auto& of_product : words[tile])
                for (uint32& word : of_product) word = converted(word);
    }

    // Scores of 16 tokens, not scaled: of rows `lane / 4` and that plus 8, of columns `lane % 4 * 2` and the next.
    // `keys` reads neighbouring words of the key of the first or the second of these rows.
    template <typename Keys>
    DEVICE void score(float (&scores)[HEAD_TILES][4], const Keys& keys) const {
        for (int run = 0; run < KEY_RUNS; ++run) {
            uint32 own[2][KEY_RUN];
            for (int half = 0; half < 2; ++half) keys.read(own[half], half, run);
            for (int of_run = 0; of_run < PRODUCTS_OF_RUN; ++of_run) {
                uint32 a[4];
                if (IS_NARROW) {
                    for (int row = 0; row < 2; ++row) {
                        const uint32 word = own[row][of_run];
                        a[row] = widen_to_halves(static_cast<uint16>(word));
                        a[row + 2] = widen_to_halves(static_cast<uint16>(word >> 16));
                    }
                } else {
                    for (int each = 0; each < 4; ++each) a[each] = own[each % 2][2 * of_run + each / 2];
                }
                const int product = run * PRODUCTS_OF_RUN + of_run;
                for (int tile = 0; tile < HEAD_TILES; ++tile)
                    multiply(scores[tile], a[0], a[1], a[2], a[3], words[tile][product][0], words[tile][product][1]);
            }
        }
    }
};
