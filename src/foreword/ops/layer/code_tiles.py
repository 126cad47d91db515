"""The inner loop of products with quantised weights, as LLVM instructions: a few rows times a few vectors of outputs.

In: addresses of packed blocks (ops/group_codes.py), of float32 rows and of the result. For every group of inputs, codes
become floats, are multiplied by the rows and added up; then the group's sum is scaled. Every row runs the same operations in
the same order, whatever the other rows of a tile are. So a row's result has the same bits in every tile.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from zlib import crc32

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from foreword.ops.group_codes import PANEL, STEP

SOURCE = crc32(Path(__file__).read_bytes())
"""Machine code on disk is found by the constants of its function: with this one, it is not that of an earlier version."""

AHEAD, LINE = 2560, 64  # bytes: how far ahead memory is asked for, and how much comes at a time

I1, I8, I32, I64, F16, F32 = ir.IntType(1), ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.HalfType(), ir.FloatType()


@intrinsic(prefer_literal=True)
def tile(typing, source, bits, group, half, minimum, lanes, table, fused, rows, vectors, places):
    """Multiply `rows` rows by STEP panels, `vectors` vectors of `lanes` outputs at a time. These are literals, and so are
    `bits` of a code; inputs of a `group`; `half`: scales are float16; `minimum`: groups have one; `table`: codes are looked
    up by AVX-512; `fused`: the CPU has fused multiply-add. `places` are known at run time, in the order of `_Tile`.
    `source` is SOURCE."""
    literals = (bits, group, half, minimum, lanes, table, fused, rows, vectors)
    if not all(isinstance(one, types.IntegerLiteral) for one in literals):
        return None
    values = [one.literal_value for one in literals]

    def generate(context, builder, signature, arguments):
        given = cgutils.unpack_tuple(builder, arguments[-1])
        if not vectors.literal_value:  # no such tile, and no call that is reached
            return context.get_dummy_value()
        steps = STEP * PANEL // (vectors.literal_value * lanes.literal_value)
        with cgutils.for_range(builder, ir.Constant(I64, steps)) as loop:
            _Tile(builder, *values, *given).moved(loop.index).build()
        return context.get_dummy_value()

    return types.void(source, *literals, places), generate


class _Tile:
    """The instructions of one tile. Vector v covers `lanes` outputs: a part of a panel, or panel v."""

    def __init__(
        self, builder, bits, group, half, minimum, lanes, table, fused, rows, vectors,
        blocks, x, x_stride, sums, sums_stride, out, out_stride, groups, outputs,
    ):  # fmt: skip
        """The addresses: of the first panel's blocks, of the rows, of each row's sums by group, of the result. Strides are
        the bytes of a row. `groups`: how many there are. `outputs`: columns of the result from the first panel on."""
        self.builder, self.bits, self.group, self.lanes, self.rows, self.vectors = builder, bits, group, lanes, rows, vectors
        self.table, self.fused, self.minimum = table, fused, minimum
        self.scale_type = F16 if half else F32
        self.scale_bytes = 2 if half else 4
        self.code_bytes = PANEL * group * bits // 8
        self.block_bytes = self.code_bytes + PANEL * self.scale_bytes * (1 + minimum)
        self.blocks, self.x, self.x_stride, self.sums, self.sums_stride = blocks, x, x_stride, sums, sums_stride
        self.out, self.out_stride, self.groups, self.outputs = out, out_stride, groups, outputs
        self.floats, self.ints = ir.VectorType(F32, lanes), ir.VectorType(I32, lanes)
        self.zero = ir.Constant(self.floats, [0.0] * lanes)

    def moved(self, steps):
        """Return this tile, moved by a number of its own widths."""
        width = self.vectors * self.lanes
        self.blocks = self._plus(self.blocks, self._times(steps, width // PANEL * self.block_bytes))
        self.out = self._plus(self.out, self._times(steps, 4 * width))
        self.outputs = self.builder.sub(self.outputs, self._times(steps, width))
        return self

    def build(self):
        builder = self.builder
        places = [(row, vector) for row in range(self.rows) for vector in range(self.vectors)]
        totals = {place: cgutils.alloca_once_value(builder, self.zero) for place in places}
        with cgutils.for_range(builder, self.groups) as loop:
            blocks = [self._block(vector, loop.index) for vector in range(self.vectors)]
            self._prefetch(blocks)
            sums = self._group_sums(blocks, loop.index)
            self._scale(blocks, loop.index, sums, totals)
        for (row, vector), total in totals.items():
            self._store(row, vector, builder.load(total))

    def _block(self, vector, index):
        """Return the address of a vector's block, and the number of its first lane there."""
        first = vector * self.lanes
        place = self._plus(self.blocks, self._times(index, STEP * self.block_bytes))
        return self._plus(place, ir.Constant(I64, first // PANEL * self.block_bytes)), first % PANEL

    def _prefetch(self, blocks):
        """Ask for the blocks of a later group, so that the CPU does not wait for memory. An address beyond the end does no
        harm."""
        byte = I8.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
        name = "llvm.prefetch.p0" + ("" if str(byte) == "ptr" else "i8")
        fetch = cgutils.get_or_insert_function(self.builder.module, kind, name)
        options = [ir.Constant(I32, one) for one in (0, 3, 1)]  # for reading, into all caches, data
        for block in [block for block, lane in blocks if lane == 0]:
            for line in range(0, self.block_bytes, LINE):
                place = self._plus(block, ir.Constant(I64, AHEAD + line))
                self.builder.call(fetch, [self.builder.inttoptr(place, byte), *options])

    def _group_sums(self, blocks, index):
        """Return the sum of row times codes over a group, for every row and vector."""
        x = self._plus(self.x, self._times(index, 4 * self.group))
        sums = {(row, vector): self.zero for row in range(self.rows) for vector in range(self.vectors)}
        decoders = [self._codes_of_a_word if self.bits == 4 else self._code_of_a_byte] * len(blocks)
        codes = [decode(*block) for decode, block in zip(decoders, blocks, strict=True)]
        for place in range(self.group):
            found = [next(one) for one in codes]
            for row in range(self.rows):
                at = self._plus(x, self._times(self.x_stride, row))
                value = self._splat(self._load(at, 4 * place, F32, 4))
                for vector, code in enumerate(found):
                    sums[row, vector] = self._multiply_add(code, value, sums[row, vector])
        return sums

    def _codes_of_a_word(self, block, lane):
        """Yield vectors of codes; a word has eight of one output."""
        for place in range(self.group):
            if place % 8 == 0:
                words = self._load(block, place // 8 * 4 * PANEL + 4 * lane, self.ints, 16)
            yield (self._looked_up if self.table else self._shifted)(words, 4 * (place % 8))

    def _looked_up(self, words, shift):
        """The instruction reads the lowest four bits of an index."""
        values = [*range(16)] if self.minimum else [*range(8), *range(-8, 0)]
        name = "llvm.x86.avx512.permvar.sf.512"
        kind = ir.FunctionType(self.floats, [self.floats, self.ints])
        look_up = cgutils.get_or_insert_function(self.builder.module, kind, name)
        index = self.builder.lshr(words, ir.Constant(self.ints, [shift] * self.lanes)) if shift else words
        return self.builder.call(look_up, [ir.Constant(self.floats, [float(value) for value in values]), index])

    def _shifted(self, words, shift):
        constant = partial(ir.Constant, self.ints)
        if self.minimum:
            codes = self.builder.and_(self.builder.lshr(words, constant([shift] * self.lanes)), constant([15] * self.lanes))
        else:
            left = self.builder.shl(words, constant([28 - shift] * self.lanes))
            codes = self.builder.ashr(left, constant([28] * self.lanes))
        return self.builder.sitofp(codes, self.floats)

    def _code_of_a_byte(self, block, lane):
        kind = ir.VectorType(I8, self.lanes)
        for place in range(self.group):
            codes = self._load(block, place * PANEL + lane, kind, self.lanes)
            yield self.builder.sitofp(self.builder.sext(codes, self.ints), self.floats)

    def _scale(self, blocks, index, sums, totals):
        """Add a group's scaled sums, and its minimum times the sum of the row's inputs, to the totals."""
        for vector, (block, lane) in enumerate(blocks):
            scale = self._scales(block, self.code_bytes, lane)
            lowest = self._scales(block, self.code_bytes + PANEL * self.scale_bytes, lane) if self.minimum else None
            for row in range(self.rows):
                total = totals[row, vector]
                value = self._multiply_add(sums[row, vector], scale, self.builder.load(total))
                if lowest is not None:
                    at = self._plus(self.sums, self._times(self.sums_stride, row))
                    of_row = self._load(self._plus(at, self._times(index, 4)), 0, F32, 4)
                    value = self._multiply_add(lowest, self._splat(of_row), value)
                self.builder.store(value, total)

    def _scales(self, block, offset, lane):
        found = self._load(block, offset + self.scale_bytes * lane, ir.VectorType(self.scale_type, self.lanes), 8)
        return found if self.scale_type is F32 else self.builder.fpext(found, self.floats)

    def _store(self, row, vector, value):
        """Write a vector to the result; the last panel may have lanes beyond its last column."""
        first, masks = vector * self.lanes, ir.VectorType(I1, self.lanes)
        lanes = ir.Constant(self.ints, [first + lane for lane in range(self.lanes)])
        count = self.builder.trunc(self.outputs, I32)
        mask = self.builder.icmp_signed("<", lanes, self._splat(count))
        at = self._plus(self._plus(self.out, self._times(self.out_stride, row)), ir.Constant(I64, 4 * first))
        pointer = self.builder.inttoptr(at, self.floats.as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [self.floats, pointer.type, I32, masks])
        name = f"llvm.masked.store.v{self.lanes}f32.p0" + ("" if str(pointer.type) == "ptr" else f"v{self.lanes}f32")
        store = cgutils.get_or_insert_function(self.builder.module, kind, name)
        self.builder.call(store, [value, pointer, ir.Constant(I32, 4), mask])

    def _multiply_add(self, one, other, total):
        if not self.fused:
            return self.builder.fadd(self.builder.fmul(one, other), total)
        kind = ir.FunctionType(self.floats, [self.floats] * 3)
        fma = cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.fma.v{self.lanes}f32")
        return self.builder.call(fma, [one, other, total])

    def _splat(self, value):
        kind = ir.VectorType(value.type, self.lanes)
        one = self.builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(I32, 0))
        return self.builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(self.ints, [0] * self.lanes))

    def _load(self, address, offset, kind, align):
        pointer = self.builder.inttoptr(self._plus(address, ir.Constant(I64, offset)), kind.as_pointer())
        return self.builder.load(pointer, align=align)

    def _plus(self, one, other):
        return self.builder.add(one, other)

    def _times(self, value, factor):
        return self.builder.mul(value, ir.Constant(I64, factor))


@intrinsic
def taken(typing, job, count):
    """Add `count` to the first integer of a job, in one step for all threads, and return what was there before."""

    def generate(context, builder, signature, arguments):
        counter = builder.bitcast(arguments[0], I64.as_pointer())
        return builder.atomic_rmw("add", counter, arguments[1], "monotonic")

    return types.int64(types.voidptr, types.int64), generate


@intrinsic
def integer_at(typing, job, index):
    """Return an integer of a job."""

    def generate(context, builder, signature, arguments):
        return _integer(builder, *arguments)

    return types.int64(types.voidptr, types.int64), generate


@intrinsic
def pointer_at(typing, job, index):
    """Return an integer of a job as the address of float32 numbers."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(_integer(builder, *arguments), F32.as_pointer())

    return types.CPointer(types.float32)(types.voidptr, types.int64), generate


def _integer(builder, job, index):
    return builder.load(builder.gep(builder.bitcast(job, I64.as_pointer()), [index]))
