// What a block that lists has in shared memory.

constexpr int WARPS = LIST_WARPS;
constexpr int THREADS = WARPS * WARP;
// Rounding by addition: a number below 2^22 leaves the nearest whole number in the lowest bits.
constexpr float ROUNDS = 12582912.0f;
constexpr int ROUNDS_BITS = 0x4B400000;

constexpr int CODE_BYTES = HEAD_DIM / 4;
constexpr int MEAN_BYTES = HEAD_DIM / 2;
constexpr int ROW_BYTES = TOKENS_IN_ROW * CODE_BYTES;
// Words of a row, and of a mean, that a lane holds.
constexpr int WORDS = ROW_BYTES / 16;
constexpr int MEAN_WORDS = MEAN_BYTES / 16;
constexpr int TOKENS_AT_ONCE = 16 * TOKENS_IN_ROW;
constexpr int SAMPLED_BLOCKS = 4;
// What a block could score in the time in which it begins and ends a pair.
constexpr int TILES_TO_BEGIN = 16;
// Threads that add up the masses of tiles: always as many, so that sums are the same to the last bit.
constexpr int SUMMING = 256;
// In units: from which mass on another unit is needed, and what is expected at most, so that such a mass is listed: of
// as many tokens as there may be, one holds a 2^-20th.
constexpr float MAX_MASS = 1e36f;
constexpr float MAX_EXPECTED = 1e28f;

struct alignas(16) Stage {
    // When they are scored, the listed tokens' steps lie in the place of their codes, and their places in that of
    // means.
    union {
        uint8 codes[TILE * CODE_BYTES];
        uint32 steps[TILE * PADDED / 2];
    };
    union {
        uint8 means[BLOCKS_IN_TILE * MEAN_BYTES];
        uint8 places[TILE];
    };
    uint16 factors[TILE];
};

struct alignas(16) Shared {
    Stage stages[WARPS][2];
    Arrival arrivals[WARPS][2];
    // Steps of blocks' means, by columns.
    float means[WARPS][BLOCKS_IN_TILE][8];
    uint32 mean_levels[WARP][2 * MEAN_WORDS];
    int histograms[PADDED][BINS];
    float sampled[WARPS][PADDED];
    // Of columns, minus 15 times the sum of a query's levels.
    float sums[8];
    // What is known of a pair's query heads from before.
    float kept[PADDED];
    int anchor_tops[PADDED];
    int anchor_cuts[PADDED];
    // Steps of query heads; `first_bins` are relative to units.
    int units[PADDED];
    int starts[PADDED];
    int counted_from[PADDED];
    int first_bins[PADDED];
    int tops[PADDED];
    int ends[PAIRS];
    // The pairs that have tiles, how many these are, and the most tiles that one has.
    int16 acting[PAIRS];
    int acting_pairs, most_tiles;
    double share;
    int least;
    int is_last;
};

// Until the first tiles of the next pair are loaded.
DEVICE double* sums_of(Shared& shared) { return reinterpret_cast<double*>(&shared.stages[0][0]); }
