// What a block that lists has in shared memory.

constexpr int WARPS = LIST_WARPS;
// Tiles that a warp has room for: the one that it scores, and those on their way.
constexpr int STAGES = 2;
constexpr int THREADS = WARPS * WARP;
// Rounding by addition: a number below 2^22 leaves the nearest whole number in the lowest bits.
constexpr float ROUNDS = 12582912.0f;
constexpr int ROUNDS_BITS = 0x4B400000;

constexpr int CODE_BYTES = HEAD_DIM / 4;
constexpr int MEAN_BYTES = HEAD_DIM / 2;
// What of a block's piece is copied.
constexpr int PIECE_BYTES = (PIECE_END + 15) / 16 * 16;
constexpr int ROW_BYTES = TOKENS_IN_ROW * CODE_BYTES;
// Words of a row, and of a mean, that a lane holds.
constexpr int WORDS = ROW_BYTES / 16;
constexpr int MEAN_WORDS = MEAN_BYTES / 16;
constexpr int TOKENS_AT_ONCE = 16 * TOKENS_IN_ROW;
// Halves of sixteen rows whose tokens fill a word.
constexpr int HALVES_IN_WORD = 4 / TOKENS_IN_ROW;
constexpr int SAMPLED_BLOCKS = 4;
// A tile's blocks of one page.
constexpr int BLOCKS_IN_RUN = BLOCKS_IN_PAGE < BLOCKS_IN_TILE ? BLOCKS_IN_PAGE : BLOCKS_IN_TILE;
constexpr int RUNS_IN_TILE = BLOCKS_IN_TILE / BLOCKS_IN_RUN;
// What a block could score in the time in which it begins and ends a pair.
constexpr int TILES_TO_BEGIN = 16;
// Threads that add up the masses of tiles: always as many, so that sums are the same to the last bit.
constexpr int SUMMING = 256;
static_assert(THREADS >= SUMMING, "each of them is a thread");
// In units: from which mass on another unit is needed, and what is expected at most, so that such a mass is listed: of
// as many tokens as there may be, one holds a 2^-20th.
constexpr float MAX_MASS = 1e36f;
constexpr float MAX_EXPECTED = 1e28f;

// A tile: its blocks' pieces, and when they are scored, the bits of all scores and the places of the listed tokens.
union alignas(16) Stage {
    uint8 pieces[BLOCKS_IN_TILE][PIECE_BYTES];
    struct {
        uint32 scores[TILE][PADDED];
        uint8 places[TILE];
    } scored;
};
static_assert(sizeof(Stage) == BLOCKS_IN_TILE * PIECE_BYTES, "scores have room where their codes were");

struct alignas(16) Shared {
    Stage stages[WARPS][STAGES];
    Arrival arrivals[WARPS][STAGES];
    // Steps of blocks' means, by columns.
    float means[WARPS][BLOCKS_IN_TILE][8];
    alignas(16) uint32 mean_levels[WARP][2 * MEAN_WORDS];
    // The first bin is of what is below all others.
    int histograms[PADDED][1 + BINS];
    float sampled[WARPS][PADDED];
    // Rounded queries, and of each head the sum of its levels, and what one is worth.
    alignas(16) int8 levels[PADDED][HEAD_DIM];
    int level_sums[PADDED];
    float worths[PADDED];
    // The heaviest of a warp's kept tokens, and the mass of all, relative to that.
    float kept_tops[WARPS][PADDED], kept_masses[WARPS][PADDED];
    // Of columns, minus 15 times the sum of a query's levels.
    float sums[8];
    // What is known of a pair's query heads from before.
    float kept[PADDED];
    int anchor_tops[PADDED];
    int anchor_cuts[PADDED];
    int anchor_ends[PADDED];
    // Steps of query heads; `below_bins` are relative to units.
    int units[PADDED];
    int starts[PADDED];
    int counted_from[PADDED];
    int below_bins[PADDED];
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
