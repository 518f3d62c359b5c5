// What ThreadSanitizer is told of a kernel's threads, which are fibers: that they run beside each other, and where they
// meet; and AddressSanitizer of a block's shared memory: where it ends. Nothing where they do not watch.

#include <cstddef>

#ifdef __SANITIZE_THREAD__

extern "C" {
void* __tsan_create_fiber(unsigned flags);
void* __tsan_get_current_fiber();
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void __tsan_write_range(void* address, unsigned long size);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}

namespace races {

constexpr bool ARE_WATCHED = true;
// That one runs after the other orders nothing.
constexpr unsigned NO_ORDER = 1;

inline void* new_fiber() { return __tsan_create_fiber(0); }
inline void* own_fiber() { return __tsan_get_current_fiber(); }
inline void switch_to(void* fiber) { __tsan_switch_to_fiber(fiber, NO_ORDER); }
// What has happened here comes before what happens where the same is acquired later.
inline void release(const void* what) { __tsan_release(const_cast<void*>(what)); }
inline void acquire(const void* what) { __tsan_acquire(const_cast<void*>(what)); }
// What is written some time from here on.
inline void write(void* what, int bytes) { __tsan_write_range(what, bytes); }

// As long as there is one nothing is watched: what there is only on a host.
struct OfHost {
    OfHost() {
        AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
        AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
    }
    ~OfHost() {
        AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
        AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
    }
};

}  // namespace races

#else

namespace races {

constexpr bool ARE_WATCHED = false;

inline void* new_fiber() { return nullptr; }
inline void* own_fiber() { return nullptr; }
inline void switch_to(void*) {}
inline void release(const void*) {}
inline void acquire(const void*) {}
inline void write(void*, int) {}
struct OfHost {
    OfHost() {}
};

}  // namespace races

#endif

#ifdef __SANITIZE_ADDRESS__

extern "C" {
void __asan_poison_memory_region(const volatile void* address, size_t size);
void __asan_unpoison_memory_region(const volatile void* address, size_t size);
}
inline void forbid(void* address, int bytes) { __asan_poison_memory_region(address, bytes); }
inline void allow(void* address, int bytes) { __asan_unpoison_memory_region(address, bytes); }

#else

inline void forbid(void*, int) {}
inline void allow(void*, int) {}

#endif
