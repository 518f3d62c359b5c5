// What the kernels of a selection share: arguments, sizes, and what a row and a pair are.
//
// A pair is a row and a KV head, number row × KV heads + KV head. Steps are eighths of a doubling of mass. A pair's
// steps are written down relative to its unit, a multiple of 8, so that masses in other units are the same to the last
// bit.
//
// Defined by the launch, beside what `products.cuh` needs: QUERY_LEVELS, ROTATION_SIGNS (a bit a channel, 1 where the
// rotation's first row is negative), STEPS (from one mass to its double), BLOCK and TILE (tokens), LIST_WARPS, TAKE_WARPS,
// TAKE_ROOM (tokens), STRIDE (places in memory of a pair's query heads), PAGE_SIZE, WINDOW,
// WHOLE_SHARE, WHOLE_ABOVE, STEPS_TO_FLOOR, SPARE, SPARE_OF_END, PAIRS, BLOCKS_OF_PAIR, LOWEST_KEY, KEY_STEPS, ORDER_KEYS, ORDERS,
// WHOLE_TO_THE_END, NO_MASS, READ_BYTES; of a block's piece, BLOCK_BYTES, and where in it means and factors are, and
// what it has ends, MEANS_AT, FACTORS_AT, PIECE_END.

constexpr int BLOCKS_IN_TILE = TILE / BLOCK;
constexpr int BINS = 256;
// Columns of the matrix units are query heads, of two neighbouring tokens where a group is small.
constexpr int PADDED = GROUP <= 4 ? 4 : 8;
constexpr int TOKENS_IN_ROW = 8 / PADDED;
constexpr int BLOCKS_IN_PAGE = PAGE_SIZE / BLOCK;
// Below all scores of tokens, and above those of what is none.
constexpr int EVERYTHING = -500000;
constexpr int NEVER = 1 << 21;
constexpr float NO_SCORE = -1e6f;
constexpr int UNKNOWN = -(1 << 30);
// An anchor of a head that took everything.
constexpr int TOOK_EVERYTHING = -1;

// As `Rows`, `Policies`, `Codes`, `Anchors`, `Scratch`, `Lists` and `Selected` in Python describe them.
struct Arguments {
    const int* page_table;
    const int* lengths;
    const int* acts;
    const double* shares;
    const int* sinks;
    const int* least;
    const int* most;
    const int* by_score;
    const uint8* pieces;
    const int64* slots;
    int* anchor_tops;
    int* anchor_cuts;
    int* anchor_ends;
    const uint16* queries;
    const uint8* keys;
    int8* levels;
    int* sums;
    float* worths;
    float* kept;
    int* tops;
    int* bases;
    int* floors;
    int* open;
    float* totals;
    float* rests;
    int* histograms;
    int* met;
    int* any_open;
    uint8* marks;
    int* others;
    int* listed;
    uint8* orders;
    uint32* steps;
    uint8* places;
    int* counts;
    float* masses;
    int* units;
    int* starts;
    int* counted_from;
    int* cuts;
    int* pair_open;
    int* published;
    int64* taken;
    int* selected_slots;
    int* selected_counts;
    int64* read;
    float* beliefs;
    int64 table_stride;
    int64 tokens;
    int64 width;
    int64 read_stride;
    int64 query_row_stride;
    int64 query_head_stride;
    // From one slot's keys, and from one head's, to the next.
    int64 slot_bytes;
    int64 head_bytes;
    int tiles;
    int rows;
    int key_bytes;
    int in_order;
    float scale_log2;
};

// A row's tokens: how many, how many of the first are scored, and how many of these are sinks.
struct Bounds {
    int length, scored, sinks;

    DEVICE Bounds(const Arguments& all, int row) {
        length = all.lengths[row];
        scored = (length > WINDOW ? length - WINDOW : 0) / PAGE_SIZE * PAGE_SIZE;
        sinks = (all.sinks[row] + BLOCK - 1) / BLOCK * BLOCK;
        if (sinks > scored) sinks = scored;
        const bool is_whole = static_cast<float>(length - scored + sinks) > static_cast<float>(length) * WHOLE_SHARE;
        if (is_whole || all.acts[row] == 0) scored = 0;
    }

    DEVICE int kept() const { return length - scored + sinks; }
    // The newest tokens, then the sinks.
    DEVICE int kept_position(int place) const {
        const int newest = length - scored;
        return place < newest ? length - 1 - place : place - newest;
    }
    DEVICE int tiles() const { return (scored + TILE - 1) / TILE; }
};

DEVICE int slot_at(const Arguments& all, int row, int position) {
    return all.page_table[row * all.table_stride + position / PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE;
}

DEVICE int clamp(int number, int least, int most) { return number < least ? least : number > most ? most : number; }
DEVICE float mass_of(int steps) { return power_of_two(static_cast<float>(steps) * (1.0f / STEPS)); }
DEVICE int unit_of(float steps) { return static_cast<int>(floorf(steps)) & -STEPS; }

// What the kept tokens weigh in a unit. Apart, what is behind the point is the same to the last bit whatever the unit.
DEVICE float kept_mass(float kept, int unit) {
    const float whole = floorf(kept);
    return power_of_two((kept - whole) * (1.0f / STEPS)) * mass_of(static_cast<int>(whole) - unit);
}

// Where a request's query head has its anchors.
DEVICE int64 place_of_anchor(int64 slot, int pair, int head) {
    return slot * (KV_HEADS * GROUP) + pair % KV_HEADS * GROUP + head;
}

// A query head's step, of words that each have two.
DEVICE int step_in(const uint32 (&words)[PADDED / 2], int head) {
    return static_cast<int16>(head % 2 == 0 ? words[head / 2] & 0xffff : words[head / 2] >> 16);
}
