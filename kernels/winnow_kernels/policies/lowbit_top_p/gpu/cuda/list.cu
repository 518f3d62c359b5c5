// Scoring: every token's step, the masses of tiles, a list of the tokens that may be selected, and where selections
// end.
//
// A block of WARPS warps takes its share of all pairs' tiles, one warp a tile. From a sample of a pair's blocks and its
// last step's cut it expects where the cut will be, and lists and counts tokens from below there on. Whoever is the
// last to finish a pair knows its mass and cuts. A pair that was listed too short is listed once more by
// `list_again_kernel`, with what is known by then.

// The sum over the lanes whose columns are of the same query head.
DEVICE float sum_of_head(float number) {
    for (int mask = 4; mask < WARP; mask *= 2) number += from_xor(number, mask);
    if (TOKENS_IN_ROW == 2) number += from_xor(number, 2);
    return number;
}

// Which tokens of eight rows are listed, at their first lanes, by which lanes reach a start.
DEVICE uint32 listed_tokens(bool reaches) {
    uint32 any = ballot(reaches);
    any |= any >> 1;
    if (TOKENS_IN_ROW == 2) return any & 0x55555555;
    return (any | any >> 2) & 0x11111111;
}

// Count a step that is so much above what is counted from.
DEVICE void count_step(Shared& shared, int head, int bin, int step) {
    if (bin >= BINS - 1) {
        raise_atomically(&shared.tops[head], shared.units[head] + step);
        bin = BINS - 1;
    }
    add_atomically(&shared.histograms[head][bin], 1);
}

// Score a tile of a pair: its masses, and its list.
DEVICE void list_tile(const Arguments& all, Shared& shared, Stage& stage, const Query& query, const Marks& marks,
                      float own_factor, const Bounds& bounds, int pair, int tile, int warp, int lane) {
    constexpr int LANES_OF_TOKEN = 4 / TOKENS_IN_ROW;
    const int part = lane % 4;
    score_means<BLOCKS_IN_TILE>(shared, stage, query, own_factor, tile * TILE, bounds.sinks, bounds.scored, warp, lane);
    const Reader reader(stage, shared.means[warp], lane);
    float masses[2] = {0.0f, 0.0f};
    int listed = 0;
    const int first_lane = lane / LANES_OF_TOKEN * LANES_OF_TOKEN;
    const uint32 own = 1u << first_lane;
    const int own_place = lane / 4 * TOKENS_IN_ROW + 2 * part / PADDED;
#pragma unroll
    for (int number = 0; number < TILE / TOKENS_AT_ONCE; ++number) {
        float shifted[4];
        reader.score(shifted, query, number);
        uint32 tokens[2];
        for (int half = 0; half < 2; ++half) {
            bool reaches = false;
            for (int each = 0; each < 2; ++each) {
                float& score = shifted[2 * half + each];
                score += ROUNDS;
                masses[each] += marks.mass(score, each);
                reaches |= score >= marks.starts[each];
            }
            tokens[half] = listed_tokens(reaches);
        }
        // All lanes have read these rows' codes, and entries are no longer than codes.
        if (tokens[0] | tokens[1]) {
            for (int half = 0; half < 2; ++half) {
                if (tokens[half] & own) {
                    const int entry = listed + bits_set(tokens[half] & (own - 1));
                    const int first = as_int(shifted[2 * half]) - marks.zeros[0];
                    const int second = as_int(shifted[2 * half + 1]) - marks.zeros[1];
                    stage.steps[entry * (PADDED / 2) + part % LANES_OF_TOKEN] = pack_int16(first, second);
                    if (lane == first_lane)
                        stage.places[entry] = static_cast<uint8>(own_place + (16 * number + 8 * half) * TOKENS_IN_ROW);
                }
                listed += bits_set(tokens[half]);
            }
        }
    }
    for (float& mass : masses) mass = sum_of_head(mass);
    const int64 of_tile = static_cast<int64>(pair) * all.tiles + tile;
    if (lane < PADDED / 2)
        *reinterpret_cast<float2*>(all.masses + of_tile * PADDED + 2 * lane) = float2{masses[0], masses[1]};
    if (lane == 0) all.counts[of_tile] = listed;
    sync_warp();
    const int64 of_tokens = pair * all.tokens + static_cast<int64>(tile) * TILE;
    for (int entry = lane; entry < listed; entry += WARP) {
        uint32 steps[PADDED / 2];
        load_words(steps, stage.steps + entry * (PADDED / 2));
        store_words(all.steps + (of_tokens + entry) * (PADDED / 2), steps);
        all.places[of_tokens + entry] = stage.places[entry];
        for (int head = 0; head < PADDED; ++head) {
            const int step = step_in(steps, head), bin = step - shared.first_bins[head];
            if (bin >= 0) count_step(shared, head, bin, step);
        }
    }
}

// How many tiles pairs have up to each one's last, and which have any.
DEVICE void count_tiles(const Arguments& all, Shared& shared, bool again, int thread) {
    const int pairs = all.rows * KV_HEADS;
    for (int pair = thread; pair < pairs; pair += THREADS) {
        const int tiles = Bounds(all, pair / KV_HEADS).tiles();
        shared.ends[pair] = again && (tiles == 0 || load_shared_by_blocks(all.pair_open + pair) == 0) ? 0 : tiles;
    }
    sync_block();
    if (thread < WARP) {
        int before = 0, acting = 0, most = 0;
        for (int begin = 0; begin < pairs; begin += WARP) {
            const int pair = begin + thread, tiles = pair < pairs ? shared.ends[pair] : 0;
            const uint32 act = ballot(tiles > 0);
            if (tiles > 0) shared.acting[acting + bits_set(act & ((1u << thread) - 1))] = static_cast<int16>(pair);
            acting += bits_set(act);
            most = tiles > most ? tiles : most;
            const int end = before + sum_up_to(tiles, thread);
            if (pair < pairs) shared.ends[pair] = end;
            before = from_lane(end, WARP - 1);
        }
        for (int mask = 1; mask < WARP; mask *= 2) {
            const int other = from_xor(most, mask);
            most = other > most ? other : most;
        }
        if (thread == 0) shared.acting_pairs = acting, shared.most_tiles = most;
    }
    sync_block();
}

// The masses of a warp's sampled blocks.
DEVICE void weigh_sample(Shared& shared, const Stage& stage, const Query& query, const Marks& marks, float own_factor,
                         int warp, int lane) {
    // Sampled blocks are no sinks, or as good as any.
    score_means<SAMPLED_BLOCKS>(shared, stage, query, own_factor, 0, 0, TILE, warp, lane);
    const Reader reader(stage, shared.means[warp], lane);
    float masses[2] = {0.0f, 0.0f};
#pragma unroll 1
    for (int number = 0; number < SAMPLED_BLOCKS * BLOCK / TOKENS_AT_ONCE; ++number) {
        float scores[4];
        reader.score(scores, query, number);
        for (int each = 0; each < 4; ++each) masses[each % 2] += marks.mass(scores[each] + ROUNDS, each % 2);
    }
    for (float& mass : masses) mass = sum_of_head(mass);
    if (lane < PADDED / 2) shared.sampled[warp][2 * lane] = masses[0], shared.sampled[warp][2 * lane + 1] = masses[1];
}

// List the tiles [begin, end) of a pair. Bit i of `parities` is that of the round that stage i waits for next.
template <bool AGAIN>
DEVICE void list_tiles(const Arguments& all, Shared& shared, uint32& parities, int pair, int begin, int end,
                       int thread) {
    const int warp = thread / WARP, lane = thread % WARP, part = lane % 4;
    const int row = pair / KV_HEADS;
    const Bounds bounds(all, row);
    const Source source{all, all.page_table + row * all.table_stride, pair % KV_HEADS, bounds.scored};
    Stage(&stages)[2] = shared.stages[warp];
    Arrival(&arrivals)[2] = shared.arrivals[warp];
    // Whatever is loaded is on its way before anything is waited for.
    const int64 slot = all.slots[row];
    const double share = all.shares[row];
    const int least = all.least[row], own = lane % BLOCKS_IN_TILE;
    const int64 blocks = bounds.scored / BLOCK, each = warp * SAMPLED_BLOCKS + lane % SAMPLED_BLOCKS;
    int tile = begin + warp, stage = 0;
    const uint32 sampled = source.block(static_cast<int>((2 * each + 1) * blocks / (2 * WARPS * SAMPLED_BLOCKS)));
    const uint32 block = source.block(tile * BLOCKS_IN_TILE + own);
    uint32 next_block = source.block((tile + WARPS) * BLOCKS_IN_TILE + own);
    if (!AGAIN) source.load<SAMPLED_BLOCKS>(stages[1], arrivals[1], sampled, lane);
    if (tile < end) source.load<BLOCKS_IN_TILE>(stages[0], arrivals[0], block, lane);
    const float sampled_factor = source.mean_factor(sampled);
    float factor = source.mean_factor(block);
    if (!AGAIN) wait_for_last_kernel();
    Recalled recalled;
    if (thread < PADDED) recalled.load<AGAIN>(all, slot, pair, thread);
    Query query;
    query.load(all, shared, pair, warp, lane);
    if (thread < PADDED) {
        recalled.store(shared, thread);
        if (!AGAIN) all.units[static_cast<int64>(pair) * PADDED + thread] = recalled.unit;
    }
    if (thread == 0) shared.share = share, shared.least = least;
    for (int bin = thread; bin < PADDED * BINS; bin += THREADS) (&shared.histograms[0][0])[bin] = 0;
    sync_block();
    Marks marks;
    marks.set_units(shared, part);
    if (!AGAIN) {
        wait_for_bytes(arrivals[1], parities >> 1 & 1);
        parities ^= 2;
        weigh_sample(shared, stages[1], query, marks, sampled_factor, warp, lane);
        sync_block();
        if (thread < GROUP) expect(shared, bounds, thread);
    }
    if (thread < PADDED) shared.first_bins[thread] = shared.counted_from[thread] - shared.units[thread];
    sync_block();
    marks.set_starts(shared, part);
#pragma unroll 1
    for (; tile < end; tile += WARPS) {
        const float own_factor = factor;
        if (tile + WARPS < end) source.load<BLOCKS_IN_TILE>(stages[1 - stage], arrivals[1 - stage], next_block, lane);
        factor = source.mean_factor(next_block);
        next_block = source.block((tile + 2 * WARPS) * BLOCKS_IN_TILE + own);
        wait_for_bytes(arrivals[stage], parities >> stage & 1);
        parities ^= 1 << stage;
        list_tile(all, shared, stages[stage], query, marks, own_factor, bounds, pair, tile, warp, lane);
        stage = 1 - stage;
    }
    sync_block();
    const int64 of_heads = static_cast<int64>(pair) * STRIDE;
    for (int bin = thread; bin < GROUP * BINS; bin += THREADS) {
        const int counted = (&shared.histograms[0][0])[bin];
        if (counted != 0) add_atomically(all.histograms + of_heads * BINS + bin, counted);
    }
    if (thread < GROUP && shared.tops[thread] != UNKNOWN)
        raise_atomically(all.tops + of_heads + thread, shared.tops[thread]);
    sync_block();
    if (thread == 0) {
        fence_blocks();
        const int known = add_atomically(all.met + pair, end - begin) + end - begin;
        shared.is_last = known == bounds.tiles();
        if (shared.is_last) all.met[pair] = 0;
        fence_blocks();
    }
    sync_block();
    if (shared.is_last) settle(all, shared, bounds, row, pair, AGAIN, thread);
}

// List this block's share of all pairs' tiles.
template <bool AGAIN>
DEVICE void list_share(const Arguments& all, Shared& shared) {
    const int thread = thread_number();
    if (thread % WARP == 0)
        for (Arrival& arrival : shared.arrivals[thread / WARP]) set_up(arrival);
    uint32 parities = 0;
    count_tiles(all, shared, AGAIN, thread);
    const int pairs = all.rows * KV_HEADS, total = shared.ends[pairs - 1], acting = shared.acting_pairs;
    if (acting == 0) return;
    const int share = (total + blocks_in_grid() - 1) / blocks_in_grid(), block = block_number();
    int begin = block * share, end = begin + share < total ? begin + share : total;
    // A pair's blocks have no other where that leaves none of them much more to do.
    const int of_pair = blocks_in_grid() / acting;
    if (of_pair > 0 && shared.most_tiles <= of_pair * (share + TILES_TO_BEGIN)) {
        if (block / of_pair >= acting) return;
        const int pair = shared.acting[block / of_pair];
        const int first = pair > 0 ? shared.ends[pair - 1] : 0, after = shared.ends[pair];
        const int own = (after - first + of_pair - 1) / of_pair;
        begin = first + block % of_pair * own;
        end = begin + own < after ? begin + own : after;
    }
    while (begin < end) {
        int low = 0, high = pairs - 1;
        while (low < high) {
            const int middle = (low + high) / 2;
            if (shared.ends[middle] > begin)
                high = middle;
            else
                low = middle + 1;
        }
        const int first = low > 0 ? shared.ends[low - 1] : 0;
        const int after = shared.ends[low] < end ? shared.ends[low] : end;
        list_tiles<AGAIN>(all, shared, parities, low, begin - first, after - first, thread);
        begin = after;
        sync_block();
    }
}

// Grid: as many blocks as the device takes at once. What the last kernel prepares is not needed to begin to load codes.
KERNEL(THREADS, 2) list_kernel(const Arguments all) {
    DYNAMIC_SHARED(memory);
    list_share<false>(all, *reinterpret_cast<Shared*>(memory));
    // A block that had nothing to do has not waited yet, and who waits for this kernel relies on the last one, too.
    wait_for_last_kernel();
}

// The pairs that are open. Grid: the same.
KERNEL(THREADS, 2) list_again_kernel(const Arguments all) {
    wait_for_last_kernel();
    if (load_shared_by_blocks(all.any_open) == 0) return;
    DYNAMIC_SHARED(memory);
    list_share<true>(all, *reinterpret_cast<Shared*>(memory));
}
