// Predicted scores: products of a pair's rounded queries with the codes of its tokens, on the matrix units.

// A pair's queries as a lane meets codes with them.
struct Query {
    uint32 codes[4][WORDS];
    // Of this lane's two query heads: what a 64th of two levels is worth, and three times the sum of all, in steps.
    float worths[2], sums[2];

    DEVICE void load(Shared& shared, int warp, int lane) {
        const int column = lane / 4, part = lane % 4, head = column % PADDED;
        // The first warp has more to do.
        const bool is_sharing = warp == 1;
        const int8* levels = shared.levels[head];
        for (int word = 0; word < WORDS; ++word) {
            // Four bytes of codes: 16 channels, of one token of the row.
            const int byte = 4 * (WORDS * part + word);
            const bool is_own = head < GROUP && byte / CODE_BYTES == column / PADDED;
            uint32 of_byte[4] = {0, 0, 0, 0};
            if (is_own) load_words(of_byte, levels + 4 * (byte % CODE_BYTES));
            uint32 low[2], high[2];
            for (int each = 0; each < 2; ++each) {
                const uint32 digits = each == 0 ? 0x5140 : 0x7362;
                low[each] = choose_bytes(of_byte[0], of_byte[1], digits);
                high[each] = choose_bytes(of_byte[2], of_byte[3], digits);
            }
            for (int plane = 0; plane < 4; ++plane)
                codes[plane][word] = choose_bytes(low[plane / 2], high[plane / 2], plane % 2 == 0 ? 0x5410 : 0x7632);
        }
        for (int each = 0; each < 2; ++each) {
            const int own = (2 * part + each) % PADDED;
            const bool is_head = own < GROUP;
            const float worth = is_head ? shared.worths[own] : 0.0f;
            const float sum = is_head ? worth * static_cast<float>(shared.level_sums[own]) : 0.0f;
            worths[each] = worth * (1.0f / 32);
            sums[each] = -3.0f * sum;
            if (is_sharing && column == 0) shared.sums[2 * part + each] = -15.0f * sum;
        }
        if (is_sharing)
            for (int word = 0; word < MEAN_WORDS; ++word) {
                uint32 of_bytes[2] = {0, 0};
                if (head < GROUP) load_words(of_bytes, levels + 8 * (MEAN_WORDS * part + word));
                shared.mean_levels[lane][2 * word] = choose_bytes(of_bytes[0], of_bytes[1], 0x6420);
                shared.mean_levels[lane][2 * word + 1] = choose_bytes(of_bytes[0], of_bytes[1], 0x7531);
            }
    }
};

// Where a pair's tokens are, as far as a warp loads them.
struct Source {
    const Arguments& all;
    const int* table;
    int kv_head, scored;

    // The block of the context's block `number`.
    DEVICE uint32 block(int number) const {
        const int last = scored / BLOCK - 1;
        number = number < last ? number : last;
        const uint32 in_page = static_cast<uint32>(number) % BLOCKS_IN_PAGE;
        return (table[static_cast<uint32>(number) / BLOCKS_IN_PAGE] * BLOCKS_IN_PAGE + in_page) * KV_HEADS + kv_head;
    }

    // The first block of this lane's run in a tile. What is scored ends where a page does, and so where a run does.
    DEVICE uint32 first_of_run(int tile, int lane) const {
        return block(tile * BLOCKS_IN_TILE + lane % RUNS_IN_TILE * BLOCKS_IN_RUN);
    }

    // Begin to load blocks, in runs of one page; lane i holds the first of the i-th run.
    template <int BLOCKS, int IN_RUN>
    DEVICE void load(Stage& stage, Arrival& arrival, uint32 own_first, int lane) const {
        fence_copies();
        sync_warp();
        // Lanes that copy for themselves take turns, and the next begins when the last is through.
        uint32 firsts[BLOCKS / IN_RUN];
#pragma unroll
        for (int run = 0; run < BLOCKS / IN_RUN; ++run) firsts[run] = from_lane(own_first, run);
        if (is_elected()) {
            expect_bytes(arrival, BLOCKS * PIECE_BYTES);
#pragma unroll
            for (int each = 0; each < BLOCKS; ++each) {
                const uint64 block = firsts[each / IN_RUN] + each % IN_RUN * KV_HEADS;
                copy_bytes(stage.pieces[each], all.pieces + block * BLOCK_BYTES, PIECE_BYTES, arrival);
            }
        }
    }
};

// Predicts blocks' mean scores, in steps, for all columns; blocks outside of [sinks, scored) have none.
template <int BLOCKS>
DEVICE void score_means(Shared& shared, const Stage& stage, const Query& query, int first, int sinks, int scored,
                        int warp, int lane) {
    const int row = lane / 4, part = lane % 4;
    uint32 words[MEAN_WORDS], levels[2 * MEAN_WORDS];
    for (uint32& word : words) word = 0;
    if (row < BLOCKS) load_words(words, stage.pieces[row] + MEANS_AT + 4 * MEAN_WORDS * part);
    load_words(levels, shared.mean_levels[lane]);
    int products[4] = {0, 0, 0, 0};
    for (int word = 0; word < MEAN_WORDS; word += 2)
        for (int plane = 0; plane < 2; ++plane)
            multiply_add(products, words[word] >> 4 * plane & 0x0f0f0f0f, 0, words[word + 1] >> 4 * plane & 0x0f0f0f0f,
                         0, levels[2 * word + plane], levels[2 * word + 2 + plane]);
    // The bits of a mean's factor are the signs of its tokens' factors: each of a row's four lanes has four of them.
    uint32 factors[2] = {0, 0}, bits = 0;
    if (row < BLOCKS) load_words(factors, stage.pieces[row] + FACTORS_AT + sizeof(factors) * part);
    for (int word = 0; word < 2; ++word)
        bits |= ((factors[word] >> 15 & 1) | (factors[word] >> 30 & 2)) << (4 * part + 2 * word);
    bits |= from_xor(bits, 1);
    bits |= from_xor(bits, 2);
    if (row < BLOCKS) {
        const int token = first + row * BLOCK;
        const float factor = from_half(static_cast<uint16>(bits));
        for (int each = 0; each < 2; ++each) {
            const float product = static_cast<float>(products[each]);
            const float mean = multiply_then_add(product, 64 * query.worths[each], shared.sums[2 * part + each]);
            shared.means[warp][row][2 * part + each] = token < sinks || token >= scored ? NO_SCORE : mean * factor;
        }
    }
    sync_warp();
}

// What a lane reads of a stage.
struct Reader {
    const uint8* codes;
    const uint8* factors;
    const float* means;

    DEVICE Reader(const Stage& stage, const float (&of_warp)[BLOCKS_IN_TILE][8], int lane) {
        const int row = lane / 4, part = lane % 4;
        codes = stage.pieces[0] + row * ROW_BYTES + 4 * WORDS * part;
        factors = stage.pieces[0] + FACTORS_AT + (row * TOKENS_IN_ROW + 2 * part / PADDED) * sizeof(uint16);
        means = &of_warp[0][2 * part];
    }

    // A lane's scores of the `number`-th 16 rows: of its two query heads for a token of the first 8, then of the
    // last 8.
    DEVICE void score(float (&scores)[4], const Query& query, int number) const {
        constexpr int ROWS_IN_BLOCK = BLOCK / TOKENS_IN_ROW;
        uint32 words[2][WORDS];
        for (int half = 0; half < 2; ++half) {
            const int row = 16 * number + 8 * half;
            load_words(words[half], codes + row / ROWS_IN_BLOCK * PIECE_BYTES + row % ROWS_IN_BLOCK * ROW_BYTES);
        }
        // Codes are masked where they stand, so that a plane counts four times what the one below does.
        int planes[4][4] = {};
        for (int& sum : planes[3]) sum = ROUNDS_BITS;
        for (int word = 0; word < WORDS; word += 2)
            for (int plane = 0; plane < 4; ++plane) {
                const uint32 mask = 0x03030303u << 2 * plane;
                const auto& levels = query.codes[plane];
                multiply_add(planes[plane], words[0][word] & mask, words[1][word] & mask, words[0][word + 1] & mask,
                             words[1][word + 1] & mask, levels[word], levels[word + 1]);
            }
        for (int half = 0; half < 2; ++half) {
            const int row = 16 * number + 8 * half, block = row / ROWS_IN_BLOCK;
            const uint8* const of_row =
                factors + block * PIECE_BYTES + row % ROWS_IN_BLOCK * TOKENS_IN_ROW * sizeof(uint16);
            const float factor = from_half(*reinterpret_cast<const uint16*>(of_row) & 0x7fff);
            for (int each = 0; each < 2; ++each) {
                const int place = 2 * half + each;
                const int sum = 4 * (4 * (4 * planes[0][place] + planes[1][place]) + planes[2][place]);
                const float product = as_float(sum + planes[3][place]) - ROUNDS;
                const float value = multiply_then_add(product, query.worths[each], query.sums[each]);
                scores[place] = multiply_then_add(value, factor, means[8 * block + each]);
            }
        }
    }
};
static_assert(64 * 3 * 127 * HEAD_DIM < 1 << 22, "sums are rounded by addition");

// What a lane needs to weigh and to list the tokens of its two query heads. Steps are rounded by addition.
struct Marks {
    float to_logarithms[2], starts[2];

    DEVICE void set_units(const Shared& shared, int part) {
        for (int each = 0; each < 2; ++each) {
            const int unit = shared.units[(2 * part + each) % PADDED];
            to_logarithms[each] = -(ROUNDS + static_cast<float>(unit)) * (1.0f / STEPS);
        }
    }

    DEVICE void set_starts(const Shared& shared, int part) {
        for (int each = 0; each < 2; ++each)
            starts[each] = ROUNDS + static_cast<float>(shared.starts[(2 * part + each) % PADDED]);
    }

    DEVICE float mass(float shifted, int each) const {
        return power_of_two(multiply_then_add(shifted, 1.0f / STEPS, to_logarithms[each]));
    }
};
