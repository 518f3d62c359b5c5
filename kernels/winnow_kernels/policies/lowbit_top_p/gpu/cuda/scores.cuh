// Predicted scores: products of a pair's rounded queries with the codes of its tokens, on the matrix units.

// A pair's queries as a lane meets codes with them.
struct Query {
    uint32 codes[4][WORDS];
    // Of this lane's two query heads: what a quarter of two levels is worth, and three times the sum of all, in steps.
    float worths[2], sums[2];

    DEVICE void load(const Arguments& all, Shared& shared, int pair, int warp, int lane) {
        const int column = lane / 4, part = lane % 4, head = column % PADDED;
        const int64 of_heads = static_cast<int64>(pair) * STRIDE;
        const uint8* levels = reinterpret_cast<const uint8*>(all.levels) + (of_heads + head) * HEAD_DIM;
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
            const float worth = is_head ? all.worths[of_heads + own] : 0.0f;
            const float sum = is_head ? worth * static_cast<float>(all.sums[of_heads + own]) : 0.0f;
            worths[each] = 0.5f * worth;
            sums[each] = -3.0f * sum;
            if (warp == 0 && column == 0) shared.sums[2 * part + each] = -15.0f * sum;
        }
        if (warp == 0)
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

    // Begin to load blocks; lane i holds the number of the i-th.
    template <int BLOCKS>
    DEVICE void load(Stage& stage, Arrival& arrival, uint32 own_block, int lane) const {
        constexpr int CODES = BLOCK * CODE_BYTES, FACTORS = BLOCK * sizeof(uint16);
        fence_copies();
        sync_warp();
        if (lane == 0) expect_bytes(arrival, BLOCKS * (CODES + MEAN_BYTES + FACTORS));
        if (lane < BLOCKS) {
            const uint64 block = own_block;
            copy_bytes(stage.codes + lane * CODES, all.codes + block * CODES, CODES, arrival);
            copy_bytes(stage.means + lane * MEAN_BYTES, all.means + block * MEAN_BYTES, MEAN_BYTES, arrival);
            copy_bytes(stage.factors + lane * BLOCK, all.factors + block * BLOCK, FACTORS, arrival);
        }
    }

    DEVICE float mean_factor(uint32 block) const { return all.mean_factors[block]; }
};

// Predicts blocks' mean scores, in steps, for all columns; blocks outside of [sinks, scored) have none. Lane i holds
// the factor of the i-th block's mean.
template <int BLOCKS>
DEVICE void score_means(Shared& shared, const Stage& stage, const Query& query, float own_factor, int first, int sinks,
                        int scored, int warp, int lane) {
    const int row = lane / 4, part = lane % 4;
    uint32 words[MEAN_WORDS], levels[2 * MEAN_WORDS];
    for (uint32& word : words) word = 0;
    if (row < BLOCKS) load_words(words, stage.means + row * MEAN_BYTES + 4 * MEAN_WORDS * part);
    load_words(levels, shared.mean_levels[lane]);
    const float factor = from_lane(own_factor, row);
    int products[4] = {0, 0, 0, 0};
    for (int word = 0; word < MEAN_WORDS; word += 2)
        for (int plane = 0; plane < 2; ++plane)
            multiply_add(products, words[word] >> 4 * plane & 0x0f0f0f0f, 0, words[word + 1] >> 4 * plane & 0x0f0f0f0f,
                         0, levels[2 * word + plane], levels[2 * word + 2 + plane]);
    if (row < BLOCKS) {
        const int token = first + row * BLOCK;
        for (int each = 0; each < 2; ++each) {
            const float product = static_cast<float>(products[each]);
            const float mean = multiply_then_add(product, 4 * query.worths[each], shared.sums[2 * part + each]);
            shared.means[warp][row][2 * part + each] = token < sinks || token >= scored ? NO_SCORE : mean * factor;
        }
    }
    sync_warp();
}

// What a lane reads of a stage.
struct Reader {
    const uint8* codes;
    const uint16* factors;
    const float* means;

    DEVICE Reader(const Stage& stage, const float (&of_warp)[BLOCKS_IN_TILE][8], int lane) {
        const int row = lane / 4, part = lane % 4;
        codes = stage.codes + row * ROW_BYTES + 4 * WORDS * part;
        factors = stage.factors + row * TOKENS_IN_ROW + 2 * part / PADDED;
        means = &of_warp[0][2 * part];
    }

    // A lane's scores of the `number`-th 16 rows: of its two query heads for a token of the first 8, then of the
    // last 8.
    DEVICE void score(float (&scores)[4], const Query& query, int number) const {
        uint32 low[WORDS], high[WORDS];
        load_words(low, codes + 16 * number * ROW_BYTES);
        load_words(high, codes + (16 * number + 8) * ROW_BYTES);
        // Codes are masked where they stand, so that every second plane counts four times.
        int even[4] = {0, 0, 0, 0}, odd[4] = {ROUNDS_BITS, ROUNDS_BITS, ROUNDS_BITS, ROUNDS_BITS};
        for (int half = 0; half < 2; ++half)
            for (int word = 0; word < WORDS; word += 2) {
                const uint32 a0 = low[word] >> 4 * half, a1 = high[word] >> 4 * half;
                const uint32 a2 = low[word + 1] >> 4 * half, a3 = high[word + 1] >> 4 * half;
                const uint32 first = 0x03030303, second = 0x0c0c0c0c;
                const auto &of_even = query.codes[2 * half], &of_odd = query.codes[2 * half + 1];
                multiply_add(even, a0 & first, a1 & first, a2 & first, a3 & first, of_even[word], of_even[word + 1]);
                multiply_add(odd, a0 & second, a1 & second, a2 & second, a3 & second, of_odd[word], of_odd[word + 1]);
            }
        for (int half = 0; half < 2; ++half) {
            const int block = TOKENS_IN_ROW == 2 ? 2 * number + half : number;
            const float factor = from_half(factors[(16 * number + 8 * half) * TOKENS_IN_ROW]);
            for (int each = 0; each < 2; ++each) {
                const int place = 2 * half + each;
                const float product = as_float(4 * even[place] + odd[place]) - ROUNDS;
                const float value = multiply_then_add(product, query.worths[each], query.sums[each]);
                scores[place] = multiply_then_add(value, factor, means[8 * block + each]);
            }
        }
    }
};

// What a lane needs to weigh and to list the tokens of its two query heads. Steps are rounded by addition.
struct Marks {
    float to_logarithms[2], starts[2];
    int zeros[2];

    DEVICE void set_units(const Shared& shared, int part) {
        for (int each = 0; each < 2; ++each) {
            const int unit = shared.units[(2 * part + each) % PADDED];
            zeros[each] = ROUNDS_BITS + unit;
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
