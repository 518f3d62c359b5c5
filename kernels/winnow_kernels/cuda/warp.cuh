// What a warp's lanes do together, and a lane with words that lie next to each other.

constexpr int WARP = 32;

// Add up numbers of the lanes up to each.
DEVICE int sum_up_to(int number, int lane) {
    for (int distance = 1; distance < WARP; distance *= 2) {
        const int of_others = from_lane(number, lane >= distance ? lane - distance : lane);
        if (lane >= distance) number += of_others;
    }
    return number;
}

// The sum, and the highest, of numbers of all lanes; or of those that are a multiple of EVERY away.
template <int EVERY = 1, typename T>
DEVICE T sum_of_lanes(T number) {
    for (int mask = EVERY; mask < WARP; mask *= 2) number += from_xor(number, mask);
    return number;
}
template <int EVERY = 1>
DEVICE float highest_of_lanes(float number) {
    for (int mask = EVERY; mask < WARP; mask *= 2) number = fmaxf(number, from_xor(number, mask));
    return number;
}

// The sum, over the same lanes, of one of COUNT numbers, a power of two: lane i has that of number i / EVERY % COUNT.
template <int EVERY = 1, int COUNT, typename T>
DEVICE T own_sum_of_lanes(T (&numbers)[COUNT], int lane) {
    for (int half = COUNT / 2; half > 0; half /= 2) {
        const bool has_upper = (lane & half * EVERY) != 0;
        for (int each = 0; each < half; ++each) {
            const T others = has_upper ? numbers[each] : numbers[each + half];
            numbers[each] = (has_upper ? numbers[each + half] : numbers[each]) + from_xor(others, half * EVERY);
        }
    }
    return sum_of_lanes<COUNT * EVERY>(numbers[0]);
}

// Words that lie next to each other, two or four at a time.
template <int COUNT>
DEVICE void load_words(uint32 (&words)[COUNT], const void* from) {
    if constexpr (COUNT % 4 == 0) {
        for (int i = 0; i < COUNT; i += 4) {
            const uint4 four = static_cast<const uint4*>(from)[i / 4];
            words[i] = four.x, words[i + 1] = four.y, words[i + 2] = four.z, words[i + 3] = four.w;
        }
    } else {
        for (int i = 0; i < COUNT; i += 2) {
            const uint2 two = static_cast<const uint2*>(from)[i / 2];
            words[i] = two.x, words[i + 1] = two.y;
        }
    }
}

template <int COUNT>
DEVICE void store_words(void* to, const uint32 (&words)[COUNT]) {
    if constexpr (COUNT % 4 == 0) {
        for (int i = 0; i < COUNT; i += 4)
            static_cast<uint4*>(to)[i / 4] = uint4{words[i], words[i + 1], words[i + 2], words[i + 3]};
    } else {
        for (int i = 0; i < COUNT; i += 2) static_cast<uint2*>(to)[i / 2] = uint2{words[i], words[i + 1]};
    }
}
